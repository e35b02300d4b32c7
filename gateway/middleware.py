"""Pure ASGI middleware: request ids, access log and metrics; a cap on bodies. None of it buffers."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from contextlib import nullcontext

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.errors import UnsupportedMediaTypeError
from gateway.metrics import GatewayMetrics
from gateway.response_format import PREFIX
from gateway.spans import described
from shared import logs
from shared.errors import PayloadTooLargeError, RopewayError
from shared.keys import JobId
from shared.metrics import exemplar
from shared.trace_context import carried
from shared.tracing import NO_SPAN, OFF, Span, Tracing

log = structlog.get_logger(__name__)

_PROBES = frozenset({"/health", "/ready", "/metrics"})
#: Where files are uploaded, and what a form adds to their bytes at the most.
ADAPTERS, FILES = "/v1/adapters", "/v1/files"
FORM_BYTES = 1024 * 1024
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class RequestScope:
    """Outermost: gives each request an id of its own, echoes the client's, logs and counts it, catches what is left.
    Answers about one job get its id as a header, whatever their status.

    `scope["state"]` gets `internal_id`, `request_id` and `trace`, the trace context for what the request leads to;
    routes may add `job_id`.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, tracing: Tracing = OFF) -> None:
        self._app, self._metrics, self._tracing = app, metrics, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        state["trace"] = trace = carried(headers.get)
        if not self._tracing.on or scope["path"] in _PROBES:
            with logs.bind(trace=trace) if trace else nullcontext():
                await self._serve(scope, receive, send, NO_SPAN)
            return
        attributes = {"http.request.method": scope["method"], "url.scheme": scope.get("scheme", "http")}
        with self._tracing.span(scope["method"], trace, kind="server", attributes=attributes) as span:
            state["trace"] = span.trace
            with logs.bind(trace=span.trace):
                await self._serve(scope, receive, send, span)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, span: Span) -> None:
        started = time.monotonic()
        state = scope["state"]
        state["internal_id"] = internal = secrets.token_hex(16)
        state["request_id"] = given = _client_id(Headers(scope=scope).get("x-request-id"))
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = given or internal
                if job_id := _job_of(scope):
                    headers["x-ropeway-job-id"] = job_id
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except ClientDisconnect:
            pass  # while its body was read: nobody is left to answer, and it is logged below
        except Exception:  # whatever it is, the client gets the error body and the log the traceback
            log.exception("request.internal_error", internal_id=internal)
            if not status:
                await errors.answer(errors.internal(internal))(scope, receive, tagged)
        finally:
            self._record(scope, status or 499, time.monotonic() - started, span)

    def _record(self, scope: Scope, status: int, seconds: float, span: Span) -> None:
        route, state = scope.get("route"), scope["state"]
        path = getattr(route, "path", "unmatched")
        if span.recording:
            span.rename(f"{scope['method']} {path}")
            span.set(described(getattr(route, "path", None), status, state.get("job_id"), scope["path"]))
            if status >= 500:
                span.failed(str(status))
        self._metrics.requests.labels(scope["method"], path, str(status)).inc()
        self._metrics.request_seconds.labels(path).observe(seconds, exemplar(state["trace"]))
        write = log.debug if path in _PROBES else log.info
        write(
            "http.request",
            method=scope["method"],
            route=path,
            status=status,
            ms=round(seconds * 1000, 2),
            internal_id=state["internal_id"],
            request_id=state["request_id"],
            key_id=state.get("key_id"),
            job_id=state.get("job_id"),
        )


def _job_of(scope: Scope) -> str | None:
    """The job that an answer is about: the one that its route has made or that its path names; None without one."""
    made: str | None = scope["state"].get("job_id")
    if made is not None:
        return made
    names: Mapping[str, str] = scope.get("path_params", {})
    named = names.get("job_id") or names.get("response_id", "").removeprefix(PREFIX)
    return named if JobId.match(named) else None


class BodyLimit:
    """Refuses bodies over a number of bytes, before or while they are read, and compressed ones.

    Args:
        uploads: of forms, by path.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, uploads: Mapping[str, int]) -> None:
        self._app, self._max, self._uploads = app, max_bytes, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        most = self._uploads.get(scope["path"], self._max) if _is_upload(scope, headers) else self._max
        error: RopewayError | None = None
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            error = UnsupportedMediaTypeError("Content-Encoding: compressed bodies are not taken")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            error = _too_large(most)
        if error is not None:
            await errors.answer_of(error, str(scope.get("state", {}).get("internal_id")))(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > most:
                    raise _too_large(most)
            return message

        await self._app(scope, counted, send)


def _is_upload(scope: Scope, headers: Headers) -> bool:
    """Whether a body is written to the store as it comes, and may be larger than memory."""
    form = headers.get("content-type", "").startswith("multipart/form-data")
    return form and scope["method"] == "POST"


def _too_large(most: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body is larger than {most} bytes")


def _client_id(value: str | None) -> str | None:
    """The client's id if it can be echoed and logged as it is."""
    return value if value is not None and _REQUEST_ID.match(value) else None
