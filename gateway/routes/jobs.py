"""`/v1/jobs`: submit, look, follow, cancel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from gateway import job_view
from gateway.admission import JobOptions
from gateway.disconnect import Disconnect
from gateway.docs import body_docs
from gateway.errors import JobLostError, reference_of
from gateway.job_events import JobEventsResponse
from gateway.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    JobRequest,
    check_metadata,
    parse,
)
from gateway.services import Services, body_of, caller_of, repeat_of, services_of
from shared.errors import InvalidRequestError, JobNotFoundError, RopewayError, UnsupportedParameterError
from shared.jobs import JobView, Lifetime
from shared.protocol import FINAL_STATUSES

router = APIRouter(tags=["jobs"])

_JSON = "application/json"
#: Results up to this are written in the event loop.
_INLINE_BYTES = 256 * 1024
#: Sequence numbers have at most so many digits.
_MAX_DIGITS = 15
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False, description="seconds to wait for the end, bounded")]
After = Annotated[int | None, Query(ge=0, lt=10**_MAX_DIGITS, description="as Last-Event-ID, which wins")]


@router.post("/v1/jobs", status_code=202, openapi_extra=body_docs(JobRequest), response_model=None)
async def submit_job(request: Request) -> Response:
    """Queue a chat or completion. It goes on whoever is connected; its id finds it on any gateway."""
    services, order = services_of(request), await body_of(request, JobRequest)
    repeat = repeat_of(request, order)
    check_metadata(order.metadata)
    with _inside_body():
        body = _inner(order)
        options = JobOptions(
            job_class=order.job_class or body.job_class,
            flush_ms=_flush_ms(services, order, body),
            metadata=order.metadata if order.metadata is not None else body.metadata or {},
        )
        prepared = await services.preparer.prepare(body, caller_of(request), options, single=True)
    settings = services.settings
    deadline_s = settings.deadline_s if order.deadline_s is None else order.deadline_s
    entered = await services.entrance.enter(caller_of(request).tenant, prepared, repeat)
    jobs = entered.prepared.envelopes
    lifetime = Lifetime(deadline_s, settings.max_run_s, settings.retention_s)
    await services.submitter.submit(jobs, lifetime, keep=repeat is not None)
    envelope = jobs[0]
    request.scope["state"]["job_id"] = envelope.id
    headers = {"location": f"/v1/jobs/{envelope.id}", "x-ropeway-job-id": envelope.id, **entered.headers}
    return Response(job_view.of_envelope(envelope), status_code=202, media_type=_JSON, headers=headers)


@router.get("/v1/jobs/{job_id}", response_model=None)
async def get_job(request: Request, job_id: str, wait: Wait = 0.0) -> Response:
    """A job with its result; with `wait` as soon as it has ended, or when the time is over."""
    services = services_of(request)
    view = await _visible(request, job_id)
    if wait > 0 and view.status not in FINAL_STATUSES:
        await _until_ended(request, view, min(wait, services.settings.max_wait_s))
        view = await services.store.get(job_id)
    return await _shown(services, view)


@router.get("/v1/jobs/{job_id}/events", response_model=None)
async def get_job_events(
    request: Request,
    job_id: str,
    after: After = None,
    last_event_id: Annotated[str | None, Header(description="sequence number of the last event received")] = None,
) -> Response:
    """A job's frames as server-sent events, from the first or behind a sequence number, up to the last."""
    services = services_of(request)
    if caller_of(request).authenticated:
        await _visible(request, job_id)
    start = after or 0
    if last_event_id is not None and last_event_id.strip():
        start = _sequence_number(last_event_id.strip())
    return JobEventsResponse(services, job_id, start, reference_of(request))


@router.post("/v1/jobs/{job_id}/cancel", response_model=None)
async def cancel_job(request: Request, job_id: str) -> Response:
    """End a job: a queued one here and now, a running one within a step or two. Harmless to repeat."""
    services = services_of(request)
    await _visible(request, job_id)
    if await services.store.cancel(job_id) is None:
        raise JobNotFoundError("no job has this id", param="id")
    return await _shown(services, await services.store.get(job_id))


async def _shown(services: Services, view: JobView) -> Response:
    """The job as an answer; one with a large result is written in a thread."""
    pool = services.catalogue.known(view.envelope.model)
    hidden = frozenset[int]() if pool is None else pool.encoder.special_ids
    if view.result is None or len(view.result) <= _INLINE_BYTES:
        return Response(job_view.of_view(view, hidden), media_type=_JSON)
    return Response(await services.in_thread(lambda: job_view.of_view(view, hidden)), media_type=_JSON)


def _inner(order: JobRequest) -> GenerationRequest:
    """The body of the endpoint.

    Raises:
        InvalidRequestError: as of the endpoint.
    """
    if order.kind == "chat":
        return parse(ChatCompletionRequest, order.body)
    body = parse(CompletionRequest, order.body)
    if body.echo:
        raise UnsupportedParameterError("echo: a job does not support it", param="echo")
    return body


@contextmanager
def _inside_body() -> Iterator[None]:
    """Parameters of the endpoint's body are named as inside of it."""
    try:
        yield
    except RopewayError as error:
        if error.param is None:
            raise
        raise type(error)(error.message, param=f"body.{error.param}", code=error.error_code) from None


def _flush_ms(services: Services, order: JobRequest, body: GenerationRequest) -> int:
    """A job may be watched, so its tokens are published at once, unless it says that nobody does."""
    gathers = body.stream is False or (order.job_class or body.job_class) == "batch"
    return services.settings.flush_ms if gathers else 0


async def _visible(request: Request, job_id: str) -> JobView:
    """The job, if it is the caller's.

    Raises:
        JobNotFoundError: it is not, or there is none.
    """
    caller = caller_of(request)
    view = await services_of(request).store.get(job_id)
    if caller.authenticated and view.envelope.tenant != caller.tenant:
        raise JobNotFoundError("no job has this id", param="id")
    return view


async def _until_ended(request: Request, view: JobView, seconds: float) -> None:
    """Until the job has ended, time is over or the client has gone."""
    until = time.monotonic() + seconds
    async with (
        Disconnect(request.receive) as client,
        await services_of(request).hub.follow([view.id], view.last_seq) as follower,
    ):
        client.on_gone(follower.nudge)
        timer = asyncio.get_running_loop().call_later(seconds, follower.nudge)
        follower.tracks[0].look()
        try:
            while not follower.ended and not client.gone and time.monotonic() < until:
                await follower.next()
        except JobLostError:
            return  # what the queue says of it now is the answer
        finally:
            timer.cancel()


def _sequence_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise InvalidRequestError("Last-Event-ID: must be a sequence number", param="last_event_id")
    return int(text)
