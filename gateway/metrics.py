"""Metrics of one gateway, in a registry of its own, under the field's usual names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.metrics import E2E_BUCKETS, TOKEN_BUCKETS, TTFT_BUCKETS, exemplar
from shared.protocol import Timings, Usage

#: Statuses that every route can answer, for the others there is no sample until one was answered.
_STATUSES: Final = ("200", "429", "500", "503")
_OUTCOMES: Final = ("accepted", "overloaded", "error")
_SWEPT: Final = ("expired", "cancelled", "failed", "restored")


class GatewayMetrics:
    """Counters and histograms; one per application."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.requests = Counter(
            "ropeway_http_requests", "Requests by route and status", ["method", "route", "status"], registry=r
        )
        self.request_seconds = Histogram(
            "ropeway_http_request_seconds",
            "From request to the end of the answer",
            ["route"],
            buckets=E2E_BUCKETS,
            registry=r,
        )
        self.streams = Gauge("ropeway_gateway_streams", "Followers of jobs that are open", registry=r)
        self.ttft = Histogram(
            "ropeway_gateway_time_to_first_token_seconds",
            "From request to the first text, streams only",
            ["model"],
            buckets=TTFT_BUCKETS,
            registry=r,
        )
        self.queue_seconds = Histogram(
            "ropeway_gateway_queue_time_seconds", "From submit to pull", ["model"], buckets=TTFT_BUCKETS, registry=r
        )
        self.e2e = Histogram(
            "ropeway_gateway_e2e_request_latency_seconds",
            "From request to the last token",
            ["model"],
            buckets=E2E_BUCKETS,
            registry=r,
        )
        self.prompt_tokens = Counter("ropeway_gateway_prompt_tokens", "Of ended requests", ["model"], registry=r)
        self.generation_tokens = Counter(
            "ropeway_gateway_generation_tokens", "Of ended requests", ["model"], registry=r
        )
        self.request_prompt_tokens = Histogram(
            "ropeway_gateway_request_prompt_tokens",
            "Tokens of a request's prompts",
            ["model"],
            buckets=TOKEN_BUCKETS,
            registry=r,
        )
        self.request_generation_tokens = Histogram(
            "ropeway_gateway_request_generation_tokens",
            "Tokens of a request's answers",
            ["model"],
            buckets=TOKEN_BUCKETS,
            registry=r,
        )
        self.jobs = Counter(
            "ropeway_gateway_jobs", "Jobs submitted, by outcome of the call", ["model", "outcome"], registry=r
        )
        self.cancels = Counter("ropeway_gateway_cancels", "Jobs cancelled because their client went away", registry=r)
        self.events = Counter("ropeway_gateway_events", "Server-sent events", registry=r)
        self.log_reads = Counter(
            "ropeway_gateway_log_reads", "Reads of a job's log in place of its channel", registry=r
        )
        self.overflows = Counter(
            "ropeway_gateway_queue_overflows", "Slow readers moved from the channel to the log", registry=r
        )
        self.swept = Counter(
            "ropeway_gateway_swept_jobs",
            "Jobs that a sweep ended or put back, by what became of them",
            ["status"],
            registry=r,
        )
        self.reconnects = Counter("ropeway_gateway_pubsub_reconnects", "Losses of the pub/sub connection", registry=r)

        self._served: set[str] = set()
        for status in _SWEPT:
            self.swept.labels(status)

    def routes(self, routes: Iterable[tuple[str, str]]) -> None:
        """Methods and paths that are served: they have samples before anybody asks."""
        for method, path in routes:
            self.request_seconds.labels(path)
            for status in _STATUSES:
                self.requests.labels(method, path, status)

    def serves(self, model: str) -> None:
        """A pool is known: it has samples before anybody asks."""
        if model in self._served:
            return
        self._served.add(model)
        for family in (
            self.ttft, self.queue_seconds, self.e2e, self.prompt_tokens, self.generation_tokens,
            self.request_prompt_tokens, self.request_generation_tokens,
        ):  # fmt: skip
            family.labels(model)
        for outcome in _OUTCOMES:
            self.jobs.labels(model, outcome)

    def began(self, model: str, seconds: float, trace: Mapping[str, str] | None) -> None:
        """A stream has its first text."""
        self.ttft.labels(model).observe(seconds, exemplar(trace or {}))

    def ended(
        self, model: str, seconds: float, usage: Usage, timings: Timings | None, trace: Mapping[str, str] | None = None
    ) -> None:
        """A request is over."""
        example = exemplar(trace or {})
        self.e2e.labels(model).observe(seconds, example)
        self.request_prompt_tokens.labels(model).observe(usage.prompt_tokens)
        self.request_generation_tokens.labels(model).observe(usage.completion_tokens)
        self.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self.generation_tokens.labels(model).inc(usage.completion_tokens)
        if timings is not None:
            self.queue_seconds.labels(model).observe(timings.queue_ms / 1000, example)
