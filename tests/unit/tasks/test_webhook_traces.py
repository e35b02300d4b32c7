"""Tries of webhooks are spans in the trace of whoever submitted the job; the receiver goes on from them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.keys import JobId
from shared.settings import TasksSettings
from shared.tracing import OFF, Tracing
from shared.webhook_calls import Claimed
from tasks.webhook_run import WebhookRun
from tasks.webhook_send import Sent

ID, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "whsec_" + "c2VjcmV0" * 6


class Sender:
    """Notes what is sent, and answers as told."""

    def __init__(self, answer: Sent) -> None:
        self.answer = answer
        self.headers: dict[bytes, bytes] = {}

    async def send(self, url: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Sent:
        self.headers = dict(headers)
        return self.answer


def run_of(sender: Sender, tracing: Tracing) -> WebhookRun:
    parts: Any = None
    return WebhookRun(parts, parts, parts, sender, TasksSettings(), lambda: False, tracing)  # type: ignore[arg-type]


def claimed(trace: str) -> Claimed:
    return Claimed(
        str(JobId.new("pool", 0)), 2, "https://example.com/secret-path", "t", "job.completed", b'{"a": "hush"}', trace
    )


ANSWERS = [(Sent("delivered", 204), None), (Sent("timeout"), "timeout"), (Sent("answered", 500), "answered")]


@pytest.mark.parametrize(("answer", "failed"), ANSWERS)
async def test_a_try_is_a_span(answer: Sent, failed: str | None) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing, sender = Tracing(provider), Sender(answer)
    await run_of(sender, tracing)._send(claimed(f"00-{ID}-{SPAN}-01"), [SECRET])
    (span,) = exporter.get_finished_spans()
    assert span.context is not None and span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (ID, SPAN)
    assert sender.headers[b"traceparent"] == f"00-{ID}-{span.context.span_id:016x}-01".encode()
    attributes = dict(span.attributes or {})
    assert attributes["ropeway.webhook.attempt"] == 2 and attributes.get("error.type") == failed
    assert attributes.get("http.response.status_code") == answer.status
    assert "hush" not in span.to_json() and "secret-path" not in span.to_json()
    tracing.close()


async def test_without_traces_the_submitters_context_is_passed_on() -> None:
    sender = Sender(Sent("delivered", 204))
    await run_of(sender, OFF)._send(claimed(f"00-{ID}-{SPAN}-01"), [SECRET])
    assert sender.headers[b"traceparent"] == f"00-{ID}-{SPAN}-01".encode()
    await run_of(sender, OFF)._send(claimed(""), [SECRET])
    assert b"traceparent" not in sender.headers
