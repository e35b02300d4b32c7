"""The events of one job as a stream that can be taken up anywhere. Readers never cancel."""

from __future__ import annotations

import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import answers, errors, wire_format
from gateway.disconnect import ClientGoneError, Disconnect
from gateway.following import Follower
from gateway.generation import SSE_HEADERS
from gateway.services import Services
from gateway.spans import Sent, answering
from shared.errors import InvalidRequestError, JobGoneError, RopewayError
from shared.protocol import FINAL_STATUSES, Frame
from shared.trace_context import NO_TRACE, Trace, is_sampled


class JobEventsResponse(Response):
    """Frames of a job behind a sequence number, as server-sent events up to the last.

    A job that has ended and has nothing behind that number is answered with 204, which tells an `EventSource` to stay
    away.
    """

    def __init__(self, services: Services, job_id: str, after: int, reference: str) -> None:
        self.background = None
        self._services, self._job_id, self._after, self._reference = services, job_id, after, reference

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it.

        Raises:
            JobNotFoundError, JobGoneError, InvalidRequestError, OverloadedError, ServiceUnavailableError: before the
                first byte.
        """
        services = self._services
        async with (
            Disconnect(receive) as client,
            await services.hub.follow([self._job_id], self._after) as follower,
        ):
            client.on_gone(follower.nudge)
            if not await self._check(follower):
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            if opening := self._opening():
                await send({"type": "http.response.body", "body": opening, "more_body": True})
            follower.tracks[0].look()
            trace = scope.get("state", {}).get("trace", NO_TRACE)
            try:
                with answering(services.tracing, "stream", trace, follower, await self._links(trace)) as sent:
                    sent.body_bytes += len(opening)
                    await self._send_frames(follower, client, send, sent)
            except ClientGoneError:
                pass  # a reader may go at any time
            except Exception as error:  # noqa: BLE001  (too late for a status: `as_error` logs it, the stream tells it)
                info = answers.as_error(error, self._reference)
                await send({"type": "http.response.body", "body": wire_format.event(errors.body(info))})
            else:
                await send({"type": "http.response.body", "body": b""})

    async def _check(self, follower: Follower) -> bool:
        """Whether there is, or will be, anything behind the number asked for."""
        status, last = await self._services.store.status(self._job_id)
        follower.tracks[0].status = status
        if self._after > last:
            raise InvalidRequestError(f"after: the job's last event is {last}", param="after")
        if self._after < last and not await self._services.store.read_log(self._job_id, self._after, 1):
            raise JobGoneError("the events of this job have expired", param="id")
        return self._after < last or status not in FINAL_STATUSES

    async def _links(self, own: Trace) -> list[Trace]:
        """The trace of whoever submitted the job: a reader's request is another one."""
        if not (self._services.tracing.on and is_sampled(own)):
            return []
        try:
            return [await self._services.store.trace(self._job_id)]
        except RopewayError:  # it has just expired, or does not read: what is sent says so
            return []

    async def _send_frames(self, follower: Follower, client: Disconnect, send: Send, sent: Sent) -> None:
        sent_at = time.monotonic()
        while not follower.ended:
            batch = await follower.next()
            if client.gone:
                raise ClientGoneError
            sent.frames += len(batch)
            body = b"".join(self._event(frame) for _, frame in batch)
            if not body and time.monotonic() - sent_at >= self._services.settings.keepalive_s:
                body = wire_format.KEEPALIVE
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                sent.body_bytes += len(body)
                sent_at = time.monotonic()
                self._services.metrics.events.inc(len(batch))

    def _opening(self) -> bytes:
        """Events in front of those of frames."""
        return b""

    def _event(self, frame: Frame) -> bytes:
        error = None
        if frame.error is not None:
            error = errors.public(errors.error_of(frame.error, self._job_id), self._reference)
        return wire_format.frame_event(frame, error)
