"""Spans of attempts: made when they are over, under whoever queued the job, and once each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.protocol import ErrorInfo
from shared.tracing import Tracing
from tests.unit.worker.parts import FakeStore, delta, held, progress
from worker.holdings import Holdings
from worker.job import Drop, Handover, HeldJob, Progress
from worker.job_traces import JobTraces
from worker.metrics import WorkerMetrics
from worker.publisher import Publisher

ID, SUBMIT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Setup:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)
        self.traces = JobTraces(self.tracing, "me", "pool")
        self.store, self.holdings = FakeStore(), Holdings()
        self.publisher = Publisher(
            self.store, "me", self.holdings, WorkerMetrics("m"), lambda *_: None,
            on_end=lambda *_: None, room=lambda: None, traces=self.traces,
        )  # fmt: skip

    def job(self, *, epoch: int = 1, traced: bool = True) -> HeldJob:
        job = held(epoch=epoch)
        job.trace = {"traceparent": f"00-{ID}-{SUBMIT}-01"} if traced else {}
        job.since_ms = 250.0
        return job

    def play(self, job: HeldJob, *messages: Progress | Handover | Drop) -> dict[str, ReadableSpan]:
        """Take a job, do this with it and end; its spans by name."""
        self.holdings.add(job)
        self.traces.taken(job)
        self.publisher.start()
        self.publisher.put(messages)
        assert self.publisher.close(20)
        spans = self.exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@pytest.fixture
def setup() -> Iterator[Setup]:
    s = Setup()
    yield s
    s.tracing.close()


def parent(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def identity(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_job_that_is_answered_here(setup: Setup) -> None:
    job = setup.job()
    spans = setup.play(
        job,
        progress(job, started=True),
        progress(job, delta(0, 0, 5)),
        progress(job, delta(0, 1, 6, finish="length"), status="completed"),
    )
    assert set(spans) == {"queue", "attempt", "prefill", "decode"}
    queue, attempt = spans["queue"], spans["attempt"]
    assert parent(queue) == parent(attempt) == SUBMIT
    assert parent(spans["prefill"]) == parent(spans["decode"]) == identity(attempt)
    assert {span.context.trace_id for span in spans.values() if span.context} == {int(ID, 16)}
    assert queue.end_time is not None and queue.start_time is not None
    assert (queue.end_time - queue.start_time) / 1e6 == pytest.approx(250)
    said = facts(attempt)
    assert said["ropeway.attempt.outcome"] == "completed" and said["ropeway.worker.id"] == "me"
    assert said["gen_ai.request.model"] == "pool" and said["gen_ai.request.max_tokens"] == 8
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 1)
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["gen_ai.latency.e2e"] >= said["gen_ai.latency.time_to_first_token"]
    assert [(event.name, dict(event.attributes or {})) for event in attempt.events] == [
        ("preempted", {"ropeway.preemptions": 1})
    ]
    assert not any("error.type" in facts(span) for span in spans.values())
    assert facts(spans["decode"])["ropeway.decode.tokens"] == 2


def test_a_failure_is_named_by_its_code(setup: Setup) -> None:
    job = setup.job()
    failed = progress(job, status="failed")
    failed.error = ErrorInfo(message="a secret prompt", code="engine_error")
    spans = setup.play(job, progress(job, started=True), failed)
    assert facts(spans["attempt"])["ropeway.attempt.outcome"] == "failed"
    assert facts(spans["attempt"])["error.type"] == "engine_error" and not spans["attempt"].status.is_ok
    assert "decode" not in spans and "secret" not in spans["attempt"].to_json()


def test_what_was_handed_back_has_no_usage(setup: Setup) -> None:
    job = setup.job()
    spans = setup.play(job, progress(job, delta(0, 0, 5), started=True), Handover(job))
    said = facts(spans["attempt"])
    assert said["ropeway.attempt.outcome"] == "released" and said["ropeway.attempt.output_tokens"] == 1
    assert not any(name.startswith(("gen_ai.usage", "error")) for name in said)


def test_what_was_fenced_before_anything_was_done(setup: Setup) -> None:
    job = setup.job()
    spans = setup.play(job, Drop(job), Drop(job))
    assert set(spans) == {"queue", "attempt"}
    assert facts(spans["attempt"])["ropeway.attempt.outcome"] == facts(spans["attempt"])["error.type"] == "fenced"


def test_who_takes_over_tells_of_the_attempt_that_was_lost(setup: Setup) -> None:
    job = setup.job(epoch=3)
    job.lost_by, job.since_ms = "dead", 4000.0
    setup.traces.taken(job)
    (lost,) = setup.exporter.get_finished_spans()
    said = facts(lost)
    assert lost.name == "attempt" and parent(lost) == SUBMIT
    assert (said["ropeway.attempt.epoch"], said["ropeway.worker.id"]) == (2, "dead")
    assert said["ropeway.attempt.outcome"] == said["error.type"] == "lost"
    assert lost.end_time is not None and lost.start_time is not None
    assert (lost.end_time - lost.start_time) / 1e9 == pytest.approx(4)


def test_a_job_of_somebody_without_traces_has_its_own(setup: Setup) -> None:
    job = setup.job(traced=False)
    spans = setup.play(job, progress(job, delta(0, 0, 6, finish="stop"), started=True, status="completed"))
    assert parent(spans["queue"]) == "" and parent(spans["attempt"]) == identity(spans["queue"])


def test_off_costs_nothing() -> None:
    job, traces = held(), JobTraces()
    traces.taken(job)
    traces.over(job, "completed", None)
    assert job.named == {"job_id": job.id}
