"""A collector of traces: it takes OTLP over HTTP on a free port and keeps the spans."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: Until spans that are to come count as not coming.
PATIENCE_S = 90.0
KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


@dataclass(frozen=True)
class Spanned:
    """A span as it came. Ids are hex digits, times Unix nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    kind: str
    service: str
    began: int
    ended: int
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)


def until_given_up() -> None:
    """Wait until no thread of this process tries to send: they draw random numbers, which Hypothesis notices."""
    until = time.monotonic() + PATIENCE_S
    while any(thread.name.startswith(("Otel", "tracing-")) for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def parse(body: bytes) -> list[Spanned]:
    """The spans of one request."""
    found = []
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(group.resource.attributes)
        for span in (span for scope in group.scope_spans for span in scope.spans):
            found.append(
                Spanned(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    kind=KINDS[span.kind],
                    service=resource["service.name"],
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    failed=span.status.code == 2,
                    attributes=_attributes(span.attributes),
                    events=[(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in span.events],
                    links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    resource=resource,
                )
            )
    return found


class Collector:
    """Use as a context manager.

    Attributes:
        bodies: of the requests, as they came (without compression).
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._spans: list[Spanned] = []
        self._news = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """For `OTEL_EXPORTER_OTLP_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def variables(self) -> dict[str, str]:
        """What makes a process send here, often."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50", "no_proxy": "127.0.0.1"}

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        with self._news:
            self.bodies.append(body)
            self._spans += parse(body)
            self._news.notify_all()

    @property
    def spans(self) -> list[Spanned]:
        """All that have come."""
        with self._news:
            return list(self._spans)

    def until(self, condition: Callable[[Sequence[Spanned]], bool]) -> list[Spanned]:
        """Wait until the spans satisfy a condition."""
        until = time.monotonic() + PATIENCE_S
        with self._news:
            while not condition(self._spans):
                if not self._news.wait(max(0.0, until - time.monotonic())):
                    told = [f"{span.trace} {span.service} {span.name}" for span in self._spans]
                    raise AssertionError("\n".join(told) or "no span has come")
            return list(self._spans)

    def trace(self, trace_id: str, *names: str) -> list[Spanned]:
        """The spans of a trace, once there is one of each of these names, given as often as they are to come."""

        def complete(spans: Sequence[Spanned]) -> bool:
            have = [span.name for span in spans if span.trace == trace_id]
            return all(have.count(name) >= names.count(name) for name in names)

        return [span for span in self.until(complete) if span.trace == trace_id]
