"""Traces: spans of OpenTelemetry where it is installed and told where to send them; elsewhere nothing, at no cost.

Each process has a provider of its own and touches no global one. Parents are given explicitly, as the W3C trace context
that travels in headers and envelopes, so that a span may be made in any thread, and after what it tells of.
Attributes are counts, names and ids: never prompts, answers or keys.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import structlog

from shared.errors import InvalidRequestError
from shared.settings import CommonSettings
from shared.trace_context import NO_TRACE, Trace

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link
    from opentelemetry.trace import Span as OtelSpan

log = structlog.get_logger(__name__)

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]
Kind = Literal["internal", "server", "client", "producer", "consumer"]

#: Seconds that the end of a process waits for spans to be taken.
CLOSE_S: Final = 3.0
#: Seconds between two lines about a collector that takes nothing.
_SELDOM_S: Final = 60.0
_EXPORTER_LOG: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_PROTOCOL: Final = "http/protobuf"

S = TypeVar("S", bound="Span")


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened within a span. `at_ns`: Unix nanoseconds."""

    name: str
    at_ns: int
    attributes: Attributes


class Span:
    """A span that is under way; this one is not, and says nothing. As a context manager it ends with the block.

    Attributes:
        trace: the context that children are given as their parent.
        recording: whether anybody will see it.
    """

    trace: Trace = NO_TRACE
    recording: bool = False

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def rename(self, name: str) -> None:
        """Take another name."""

    def failed(self, why: str) -> None:
        """What it tells of went wrong; `why` is the name of a kind of error, never its text."""

    def end(self) -> None:
        """End it now."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.failed(kind.__name__)
        self.end()


NO_SPAN: Final = Span()


class _LiveSpan(Span):
    """One of OpenTelemetry."""

    def __init__(self, span: OtelSpan, trace: Trace) -> None:
        self._span = span
        self.trace = trace
        self.recording = span.is_recording()

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def failed(self, why: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR)
        self._span.set_attribute("error.type", why)

    def end(self) -> None:
        self._span.end()


class Tracing:
    """Makes spans; without a provider it makes none.

    Args:
        give_up: ends tries to send under way.
    """

    def __init__(self, provider: TracerProvider | None = None, give_up: Callable[[], None] = lambda: None) -> None:
        self._provider, self._give_up = provider, give_up
        self._make = None if provider is None else _Maker(provider)

    @property
    def on(self) -> bool:
        """Whether there are spans at all."""
        return self._make is not None

    def span(
        self,
        name: str,
        parent: Trace = NO_TRACE,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        links: Sequence[Trace] = (),
    ) -> Span:
        """Begin a span. `links` are traces that it has to do with and does not belong to."""
        make = self._make  # another thread may close
        if make is None:
            return NO_SPAN
        return make.span(name, parent, kind, attributes, links)

    def record(
        self,
        name: str,
        parent: Trace,
        began_ns: int,
        ended_ns: int,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        moments: Sequence[Moment] = (),
        failed: str | None = None,
    ) -> Trace:
        """A span of what is over, in Unix nanoseconds; answers the context for its children."""
        make = self._make
        if make is None:
            return parent
        return make.record(name, parent, (began_ns, ended_ns), kind, attributes, moments, failed)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, for no longer than `timeout_s`; harmless to repeat. Blocks."""
        provider, self._provider, self._make = self._provider, None, None
        if provider is None:
            return
        # The SDK would wait for half a minute where nobody listens.
        closing = threading.Thread(target=provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            log.warning("tracing.spans_lost", waited_s=timeout_s)
            self._give_up()


OFF: Final = Tracing()


class _Maker:
    """What needs the library; made once, so that nothing is imported at a span."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("ropeway")
        self._wire = TraceContextTextMapPropagator()
        self._none, self._within = Context(), set_span_in_context
        self._kinds: dict[Kind, SpanKind] = {
            "internal": SpanKind.INTERNAL,
            "server": SpanKind.SERVER,
            "client": SpanKind.CLIENT,
            "producer": SpanKind.PRODUCER,
            "consumer": SpanKind.CONSUMER,
        }

    def span(self, name: str, parent: Trace, kind: Kind, attributes: Attributes | None, links: Sequence[Trace]) -> Span:
        span = self._tracer.start_span(
            name,
            context=self._context(parent),
            kind=self._kinds[kind],
            attributes=attributes,
            links=[link for trace in links if (link := self._link(trace)) is not None],
        )
        return _LiveSpan(span, self._trace(span))

    def record(
        self,
        name: str,
        parent: Trace,
        times: tuple[int, int],
        kind: Kind,
        attributes: Attributes | None,
        moments: Sequence[Moment],
        failed: str | None,
    ) -> Trace:
        began_ns, ended_ns = times
        span = self._tracer.start_span(
            name,
            context=self._context(parent),
            kind=self._kinds[kind],
            attributes=attributes,
            start_time=began_ns,
        )
        for moment in moments:
            span.add_event(moment.name, moment.attributes, moment.at_ns)
        live = _LiveSpan(span, self._trace(span))
        if failed is not None:
            live.failed(failed)
        span.end(max(began_ns, ended_ns))
        return live.trace

    def _context(self, trace: Trace) -> Context:
        return self._wire.extract(trace, context=self._none) if trace else self._none

    def _link(self, trace: Trace) -> Link | None:
        from opentelemetry.trace import Link, get_current_span

        context = get_current_span(self._context(trace)).get_span_context()
        return Link(context) if context.is_valid else None

    def _trace(self, span: OtelSpan) -> Trace:
        carrier: dict[str, str] = {}
        self._wire.inject(carrier, context=self._within(span, self._none))
        return carrier


def open_tracing(settings: CommonSettings, service: str, instance: str | None = None) -> Tracing:
    """Traces as settings and OpenTelemetry's own variables ask for.

    Args:
        service: the name of this kind of process, where `OTEL_SERVICE_NAME` says none.
        instance: tells this process from others of its kind.

    Raises:
        InvalidRequestError: `otlp_traces_endpoint` is set and the extra `otel` is not installed.
    """
    endpoint = _endpoint(settings.otlp_traces_endpoint)
    if endpoint is None:
        return OFF
    try:
        made = _open(endpoint, service, instance)
    except ModuleNotFoundError as error:
        if settings.otlp_traces_endpoint is not None:
            raise InvalidRequestError(
                f"otlp_traces_endpoint: the package {error.name} is missing; pip install 'ropeway[otel]'",
                param="otlp_traces_endpoint",
            ) from error
        log.warning("tracing.off", why=f"the package {error.name} is missing; pip install 'ropeway[otel]'")
        return OFF
    log.info("tracing.on", endpoint=_place(endpoint))
    return made


def _endpoint(setting: str | None) -> str | None:
    """Where spans go; None where they are not wanted."""

    def variable(*names: str) -> str:
        return next((value for name in names if (value := os.environ.get(name, "").strip())), "")

    if variable("OTEL_SDK_DISABLED").lower() == "true" or variable("OTEL_TRACES_EXPORTER").lower() == "none":
        return None
    if setting is not None:
        # vLLM takes the whole path; here the root stands for the usual one.
        return setting if setting.split("://", 1)[-1].partition("/")[2] else f"{setting.rstrip('/')}/v1/traces"
    endpoint = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not endpoint and (root := variable("OTEL_EXPORTER_OTLP_ENDPOINT")):
        endpoint = f"{root.rstrip('/')}/v1/traces"
    if not endpoint:
        return None
    exporter = variable("OTEL_TRACES_EXPORTER") or "otlp"
    protocol = variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOL
    if exporter.lower() != "otlp" or protocol.lower() != _PROTOCOL:
        log.warning("tracing.off", why=f"only otlp over {_PROTOCOL} is spoken", exporter=exporter, protocol=protocol)
        return None
    return endpoint


def _open(endpoint: str, service: str, instance: str | None) -> Tracing:
    """With a provider whose sampler, batches, headers and time-outs are those of OpenTelemetry's variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter_log = logging.getLogger(_EXPORTER_LOG)
    if not any(isinstance(known, _Seldom) for known in exporter_log.filters):
        exporter_log.addFilter(_Seldom())
    provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, exporter.shutdown)


def _resource(service: str, instance: str | None) -> Resource:
    """Who sends. What the environment says of it wins."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": service, "service.namespace": "ropeway"}
    if instance is not None:
        own["service.instance.id"] = instance
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})


def _place(url: str) -> str:
    """Of a URL what may be read in a log: path and credentials can be secrets."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


class _Seldom(logging.Filter):
    """A collector that is away is a warning, now and then, and not an error with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Let one line through, then none for a while. Errors by their kind: their texts hold the collector's URL."""
        if isinstance(record.args, tuple):
            record.args = tuple(type(arg).__name__ if isinstance(arg, Exception) else arg for arg in record.args)
        if record.levelno >= logging.ERROR:
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SELDOM_S
        return True
