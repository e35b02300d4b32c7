"""One generation request from its parsed body to the end of its answer: prepare, submit, follow, answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import answers, wire_format
from gateway.admission import Caller, JobOptions
from gateway.answers import Answer, Shape
from gateway.disconnect import ClientGoneError, Disconnect
from gateway.entrance import Repeat
from gateway.following import Follower
from gateway.preparation import Prepared
from gateway.schemas import GenerationRequest
from gateway.services import Services
from gateway.spans import Sent, answering
from gateway.submission import Terms
from shared.errors import JobExpiredError, RopewayError
from shared.protocol import ErrorInfo, Frame, Timings, Usage
from shared.trace_context import NO_TRACE

log = structlog.get_logger(__name__)

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
CLIENT_CLOSED_REQUEST = 499
#: Log probabilities of prompts, candidates counted, above which an answer is written in a thread.
INLINE_CANDIDATES = 5_000
#: Seconds past a job's deadline, by this clock, that the queue has to end it.
DEADLINE_SLACK_S = 2.0


class AnswerLike(Protocol):
    """What frames are collected in; see `Answer`."""

    any_text: bool
    events: int
    timings: Timings | None

    @property
    def usage(self) -> Usage: ...
    @property
    def candidates(self) -> int: ...
    def opening(self) -> bytes: ...
    def add(self, job: int, frame: Frame, *, chunks: bool) -> bytes: ...
    def failure(self, info: ErrorInfo) -> bytes: ...
    def closing(self) -> bytes: ...
    def whole(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Style:
    """What another API does otherwise with a generation.

    Attributes:
        answer: made of what was prepared.
        naming: a context in which errors get the names of that API.
        terms: of its job.
        forget: delete the job once it was answered.
    """

    answer: Callable[[Prepared], AnswerLike]
    naming: Callable[[], AbstractContextManager[None]]
    terms: Terms
    forget: bool


class GenerationResponse(Response):
    """The answer to a chat or completion request, as a stream or whole.

    It is an ASGI application of its own, so that one scope holds the watch on the client, the subscription and the
    job. Errors before the first byte are raised, for the status to be true; later ones end the stream.
    """

    def __init__(
        self,
        services: Services,
        request: GenerationRequest,
        caller: Caller,
        reference: str,
        repeat: Repeat | None = None,
        style: Style | None = None,
    ) -> None:
        # The base class would render a body, of which there is none yet.
        self.background = None
        self._services, self._request, self._caller, self._reference = services, request, caller, reference
        self._repeat, self._style = repeat, style
        self._settings, self._metrics = services.settings, services.metrics
        self._streaming = bool(request.stream)
        self._started_at = self._sent_at = time.monotonic()
        self._headers_sent, self._text_seen = False, False
        self._pending: list[bytes] = []
        self._sent = Sent()
        self._extra_headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it.

        Raises:
            RopewayError: before the first byte.
        """
        async with Disconnect(receive) as client:
            try:
                await self._serve(client, scope, send)
            except ClientGoneError:
                if not self._headers_sent:
                    await send({"type": "http.response.start", "status": CLIENT_CLOSED_REQUEST, "headers": []})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _serve(self, client: Disconnect, scope: Scope, send: Send) -> None:
        request, services = self._request, self._services
        flush_ms = 0 if self._streaming else self._settings.flush_ms
        options = JobOptions(request.job_class, flush_ms, request.metadata or {})
        style = self._style
        with nullcontext() if style is None else style.naming():
            prepared = await services.preparer.prepare(request, self._caller, options)
        if client.gone:
            raise ClientGoneError
        entered = await services.entrance.enter(self._caller.tenant, prepared, self._repeat)
        prepared = entered.prepared
        self._extra_headers = [(name.encode(), value.encode()) for name, value in entered.headers.items()]
        scope.setdefault("state", {})["job_id"] = prepared.shape.job_ids[0]
        async with await services.hub.follow(prepared.shape.job_ids) as follower:
            client.on_gone(follower.nudge)
            if client.gone:
                raise ClientGoneError
            # From here on nothing is broken off in the middle of a command: what was submitted must be known.
            terms = None if style is None else style.terms
            await services.submitter.submit(prepared.envelopes, terms, keep=self._repeat is not None)
            answer: AnswerLike
            answer = self._answer(prepared.shape) if style is None else style.answer(prepared)
            try:
                name, way = ("stream", self._stream) if self._streaming else ("answer", self._whole)
                with answering(services.tracing, name, self._caller.trace or NO_TRACE, follower) as self._sent:
                    await way(answer, follower, client, send)
            except ClientGoneError:
                # Whoever sent a key may come back with it.
                if not request.background and self._repeat is None:
                    services.submitter.cancel_later(
                        _open(follower), self._settings.disconnect_grace_s, leave_readers=True
                    )
                raise
            except Exception as error:
                # One of its jobs failed, or this process did: the others must not go on for nobody.
                services.submitter.cancel_later(_open(follower), 0.0)
                if not self._headers_sent:
                    raise
                self._pending.append(answer.failure(answers.as_error(error, self._reference)))
                await self._flush(answer, send, last=True)
            finally:
                self._account(answer)
        if style is not None and style.forget:
            await self._forget(prepared.shape.job_ids)

    def _answer(self, shape: Shape) -> Answer:
        tier = self._request.service_tier
        if tier is not None:
            shape = replace(shape, service_tier=wire_format.tier_of(tier))
        return Answer(shape, whole=not self._streaming)

    async def _forget(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            try:
                await self._services.store.delete(job_id)
            except RopewayError as error:  # it expires soon in any case
                log.warning("job.not_forgotten", job_id=job_id, error=error.message)

    async def _stream(self, answer: AnswerLike, follower: Follower, client: Disconnect, send: Send) -> None:
        while not follower.ended:
            for job, frame in await self._next(follower, client):
                if piece := answer.add(job, frame, chunks=True):
                    self._pending.append(piece)
            if answer.any_text and not self._text_seen:
                self._text_seen = True
                self._metrics.began(self._request.model, time.monotonic() - self._started_at, self._caller.trace)
            if not follower.ended:
                await self._flush(answer, send)
        self._pending.append(answer.closing())
        await self._flush(answer, send, last=True)

    async def _flush(self, answer: AnswerLike, send: Send, *, last: bool = False) -> None:
        """Send what has gathered; after a silence, a comment, so that nothing between here and there hangs up."""
        silent = time.monotonic() - self._sent_at >= self._settings.keepalive_s
        if not self._pending and not last:
            if not silent:
                return
            self._pending.append(wire_format.KEEPALIVE)
        if not self._headers_sent:
            self._headers_sent = True
            await send({"type": "http.response.start", "status": 200, "headers": [*SSE_HEADERS, *self._extra_headers]})
            self._pending.insert(0, answer.opening())
        body = b"".join(self._pending)
        self._pending.clear()
        await send({"type": "http.response.body", "body": body, "more_body": not last})
        self._sent.body_bytes += len(body)
        self._sent_at = time.monotonic()

    async def _whole(self, answer: AnswerLike, follower: Follower, client: Disconnect, send: Send) -> None:
        while not follower.ended:
            for job, frame in await self._next(follower, client):
                answer.add(job, frame, chunks=False)
        large = answer.candidates > INLINE_CANDIDATES
        body = await self._services.in_thread(answer.whole) if large else answer.whole()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._extra_headers,
        ]
        self._headers_sent = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        self._sent.body_bytes += len(body)

    async def _next(self, follower: Follower, client: Disconnect) -> list[tuple[int, Frame]]:
        batch = await follower.next()
        if client.gone:
            raise ClientGoneError
        self._sent.frames += len(batch)
        if not batch:
            self._check_deadline(follower)
        return batch

    def _check_deadline(self, follower: Follower) -> None:
        """End a request whose job nobody ends, because no worker lives."""
        late = time.monotonic() - self._started_at - self._settings.deadline_s - DEADLINE_SLACK_S
        queued = any(track.status == "queued" and not track.ended for track in follower.tracks)
        if (late > 0 and queued) or late > self._settings.max_run_s:
            raise JobExpiredError("the job was not served before its deadline")

    def _account(self, answer: AnswerLike) -> None:
        self._metrics.events.inc(answer.events)
        seconds = time.monotonic() - self._started_at
        self._metrics.ended(self._request.model, seconds, answer.usage, answer.timings, self._caller.trace)


def _open(follower: Follower) -> list[str]:
    return [track.job_id for track in follower.tracks if not track.ended]
