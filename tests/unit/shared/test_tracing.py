"""Traces: when there are any, whose children they are, what they cost where they are off, and how they end."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from shared import tracing
from shared.errors import InvalidRequestError
from shared.metrics import exemplar
from shared.settings import CommonSettings
from shared.trace_context import carried, is_sampled, trace_id
from shared.tracing import NO_SPAN, OFF, Moment, Tracing, open_tracing
from tests.support.otlp import Collector, until_given_up
from tests.support.ports import free_port

ID, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE = {"traceparent": f"00-{ID}-{SPAN}-01", "tracestate": "vendor=7"}
VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME",
    "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER",
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def kept() -> Iterator[tuple[Tracing, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = Tracing(provider)
    yield made, exporter
    made.close()


def settings(endpoint: str | None = None) -> CommonSettings:
    return CommonSettings(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize(
    "trace", [{}, {"traceparent": ""}, {"traceparent": "00-short-b-01"}, {"traceparent": f"00-{ID}-{SPAN}"}]
)
def test_a_malformed_context_names_no_trace(trace: dict[str, str]) -> None:
    assert trace_id(trace) is None and not is_sampled(trace) and exemplar(trace) is None


def test_only_traces_that_are_recorded_are_named_by_samples() -> None:
    assert exemplar(TRACE) == {"trace_id": ID}
    assert exemplar({"traceparent": f"00-{ID}-{SPAN}-00"}) is None
    assert exemplar({"traceparent": f"00-{ID}-{SPAN}-03"}) == {"trace_id": ID}, "another flag is set as well"


def test_headers_are_carried_as_far_as_they_are_bounded() -> None:
    assert carried(TRACE.get) == TRACE
    assert carried({"tracestate": "vendor=7"}.get) == {}
    assert carried({**TRACE, "tracestate": "v" * 600}.get) == {"traceparent": TRACE["traceparent"]}
    assert carried({"traceparent": "0" * 600}.get) == {}


def test_off_makes_nothing_and_passes_the_context_on() -> None:
    assert OFF.span("x", TRACE) is NO_SPAN and not OFF.on
    assert OFF.record("x", TRACE, 0, 1) is TRACE
    with OFF.span("x") as span:
        span.set({"a": 1})
    OFF.close()


def test_spans_are_children_of_what_travels(kept: tuple[Tracing, InMemorySpanExporter]) -> None:
    made, exporter = kept
    other = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    with made.span("outer", TRACE, kind="server", attributes={"n": 1}, links=[other, {"traceparent": "junk"}]) as outer:
        outer.rename("renamed")
        made.record(
            "inner", outer.trace, 5_000, 9_000, kind="consumer", moments=[Moment("began", 6_000, {"why": "x"})],
            failed="gone",
        )  # fmt: skip
    inner, renamed = exporter.get_finished_spans()
    assert (renamed.name, inner.name) == ("renamed", "inner")
    assert trace_id(outer.trace) == ID and outer.trace["tracestate"] == "vendor=7" and outer.recording
    assert renamed.parent is not None and f"{renamed.parent.span_id:016x}" == SPAN
    assert renamed.context is not None and inner.parent is not None
    assert inner.parent.span_id == renamed.context.span_id
    assert [f"{link.context.trace_id:032x}" for link in renamed.links] == ["1" * 32]
    assert (inner.start_time, inner.end_time, inner.kind.name) == (5_000, 9_000, "CONSUMER")
    assert [(event.name, event.timestamp) for event in inner.events] == [("began", 6_000)]
    assert not inner.status.is_ok and dict(inner.attributes or {})["error.type"] == "gone"
    assert renamed.status.is_ok or renamed.status.is_unset


def test_an_exception_is_named_and_not_told(kept: tuple[Tracing, InMemorySpanExporter]) -> None:
    made, exporter = kept
    with pytest.raises(ValueError), made.span("x"):
        raise ValueError("a secret prompt")
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes or {}) == {"error.type": "ValueError"}
    assert "secret" not in span.to_json()


def test_what_is_not_sampled_is_said_on() -> None:
    made = Tracing(TracerProvider(shutdown_on_exit=False, sampler=ALWAYS_OFF))
    span = made.span("x")
    assert not span.recording and trace_id(span.trace) is not None and not is_sampled(span.trace)
    made.close()


def test_nothing_is_asked_for() -> None:
    assert open_tracing(settings(), "s") is OFF


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_switched_off_by_the_usual_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert open_tracing(settings(), "s") is OFF


@pytest.mark.parametrize(
    ("setting", "variables", "endpoint"),
    [
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/in/traces", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "https://c/in/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"},
            "http://t/x",
        ),
        (None, {}, None),
    ],
)
def test_where_spans_go(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, variables: dict[str, str], endpoint: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracing._endpoint(settings(setting).otlp_traces_endpoint) == endpoint


def test_who_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dict(tracing._resource("ropeway-worker", "w1").attributes)
    assert (own["service.name"], own["service.instance.id"]) == ("ropeway-worker", "w1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    told = dict(tracing._resource("ropeway-worker", None).attributes)
    assert (told["service.name"], told["deployment.environment"]) == ("mine", "test")


def test_spans_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        made = open_tracing(settings(), "ropeway-gateway", "g1")
        with made.span("x", TRACE):
            pass
        made.close()
        (span,) = collector.spans
    assert (span.trace, span.parent, span.service) == (ID, SPAN, "ropeway-gateway")


def test_the_sampler_is_that_of_the_usual_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with Collector() as collector:
        made = open_tracing(settings(collector.url), "s")
        with made.span("x", TRACE) as span:
            assert not span.recording
        made.close()
        assert collector.spans == []


def test_a_dead_collector_costs_a_warning_and_a_bounded_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    logging.getLogger(tracing._EXPORTER_LOG).filters.clear()
    made = open_tracing(settings(f"http://user:hush@127.0.0.1:{free_port()}/hush/traces"), "s")
    for _ in range(5):
        with made.span("x"):
            pass
        time.sleep(0.1)
    began = time.monotonic()
    made.close(1.0)
    assert time.monotonic() - began < 20, "the SDK would have waited for 30 s"
    until_given_up()
    told = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "ConnectionError" in told[0].getMessage() and "hush" not in caplog.text
    assert tracing._place("https://user:hush@c:4318/hush/traces?hush=1") == "https://c:4318"


MISSING = """
import sys
sys.modules["opentelemetry.sdk"] = None  # as if it were not installed
from shared.settings import CommonSettings
from shared.tracing import OFF, open_tracing
"""


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env: dict[str, Any] = {"PATH": "", **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_without_the_extra_the_usual_variables_are_a_warning() -> None:
    code = MISSING + "assert open_tracing(CommonSettings(), 's') is OFF"
    done = _run(code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "ropeway[otel]" in done.stdout + done.stderr


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidRequestError, match=r"ropeway\[otel\]") as refused:
        open_tracing(settings("http://127.0.0.1:1"), "s")
    assert refused.value.param == "otlp_traces_endpoint"


def test_nothing_is_imported_where_nothing_is_asked_for() -> None:
    code = (
        "import sys, shared.tracing as t, shared.settings as s\n"
        "with t.open_tracing(s.CommonSettings(), 'x').span('x', {'traceparent': 'x'}): pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = _run(code)
    assert done.returncode == 0, done.stderr
