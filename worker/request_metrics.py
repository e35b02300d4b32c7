"""Metrics of requests that ended here, with vLLM's meanings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.metrics import (
    CHOICE_BUCKETS,
    E2E_BUCKETS,
    NAMESPACE,
    TOKEN_BUCKETS,
    TPOT_BUCKETS,
    TTFT_BUCKETS,
    exemplar,
)
from shared.protocol import FINAL_STATUSES, FinishReason, JobStatus, Timings, Usage

#: How a choice ended that has no finish reason of its own.
_ENDS: Final[dict[JobStatus, FinishReason]] = {"failed": "error", "cancelled": "abort", "expired": "abort"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, and what became of each choice.

    Attributes:
        max_tokens: None where there was no limit but the context.
        finishes: one entry per choice; None where it was still open.
        longest: tokens of the longest choice.
        trace: W3C trace context.
    """

    max_tokens: int | None = None
    finishes: tuple[FinishReason | None, ...] = (None,)
    longest: int = 0
    trace: dict[str, str] = field(default_factory=dict)


class RequestMetrics:
    """Written when a request's last frame is published. Not thread-safe beyond what the library is."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"{NAMESPACE}_{name}", text, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model)

        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(f"{NAMESPACE}_{name}", text, ["model_name", label], registry=registry)

        jobs = counter("jobs", "Jobs that ended here.", "status")
        self._jobs = {status: jobs.labels(model, status) for status in sorted(FINAL_STATUSES)}
        success = counter("request_success", "Choices that ended here, by finish reason.", "finished_reason")
        reasons: tuple[FinishReason, ...] = get_args(FinishReason)
        self._success = {reason: success.labels(model, reason) for reason in reasons}
        self.ttft = histogram("time_to_first_token_seconds", "From submit to the first token.", TTFT_BUCKETS)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Between tokens of a choice, mean of a request.", TPOT_BUCKETS
        )
        self.queue_time = histogram("request_queue_time_seconds", "From submit until the engine began.", TTFT_BUCKETS)
        self.inference_time = histogram(
            "request_inference_time_seconds", "From the engine's begin to the end.", E2E_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the engine's begin to the first token.", E2E_BUCKETS
        )
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the end.", E2E_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "From submit to the end.", E2E_BUCKETS)
        self.prompt_tokens = histogram("request_prompt_tokens", "Tokens of a request's prompt.", TOKEN_BUCKETS)
        self.computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Of a prompt, tokens that no cache had.", TOKEN_BUCKETS
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a request, all choices together.", TOKEN_BUCKETS
        )
        self.longest = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", TOKEN_BUCKETS
        )
        self.n = histogram("request_params_n", "The parameter n of a request.", CHOICE_BUCKETS)
        self.max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens, if given.", TOKEN_BUCKETS)

    def ended(self, status: JobStatus, usage: Usage, timings: Timings, asked: Asked) -> None:
        """A request's last frame is published."""
        self._jobs[status].inc()
        for finish in asked.finishes:
            self._success[finish or _ENDS.get(status, "error")].inc()
        self._times(usage, timings, asked.longest, exemplar(asked.trace))
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.computed_tokens.observe(max(0, usage.prompt_tokens - usage.cached_tokens))
        self.generation_tokens.observe(usage.completion_tokens)
        self.longest.observe(asked.longest)
        self.n.observe(len(asked.finishes))
        if asked.max_tokens is not None:
            self.max_tokens.observe(asked.max_tokens)

    def _times(self, usage: Usage, timings: Timings, longest: int, trace: dict[str, str] | None) -> None:
        queue, first, run = (ms / 1e3 for ms in (timings.queue_ms, timings.first_token_ms, timings.run_ms))
        self.queue_time.observe(max(0.0, queue), trace)
        self.inference_time.observe(run, trace)
        self.e2e.observe(max(0.0, queue + run), trace)
        if usage.completion_tokens > 0:
            self.ttft.observe(max(0.0, queue + first), trace)
            self.prefill_time.observe(first, trace)
            self.decode_time.observe(max(0.0, run - first), trace)
        if longest > 1:  # choices are generated side by side
            self.tpot.observe(max(0.0, run - first) / (longest - 1), trace)
