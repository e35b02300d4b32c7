"""`/v1/jobs`: submit, list, look, follow, cancel, delete."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Annotated, Literal, cast, get_args

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request, Response

from gateway import job_list, job_orders, job_view, wire_format
from gateway.disconnect import Disconnect
from gateway.docs import body_docs
from gateway.errors import JobLostError, reference_of
from gateway.job_events import JobEventsResponse
from gateway.job_view import JobListBody
from gateway.schemas import JobRequest, JobsRequest, TokenRequest
from gateway.services import Services, body_of, caller_of, repeat_of, services_of
from gateway.submission import Terms
from shared.errors import InvalidRequestError, JobNotFoundError, ModelNotFoundError
from shared.jobs import JobView, Lifetime
from shared.keys import JobId
from shared.protocol import FINAL_STATUSES, Envelope, JobStatus

router = APIRouter(tags=["jobs"])

_JSON = "application/json"
#: Results up to this are written in the event loop.
_INLINE_BYTES = 256 * 1024
#: Sequence numbers have at most so many digits.
_MAX_DIGITS = 15
#: Seconds that a token is good for, where nothing is said.
TOKEN_S = 300.0
Id = Annotated[str, Path(description="the job's id")]
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False, description="seconds to wait for the end, bounded")]
After = Annotated[int | None, Query(ge=0, lt=10**_MAX_DIGITS, description="as Last-Event-ID, which wins")]
Moment = Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Unix seconds")]


class _Token(msgspec.Struct, frozen=True):
    token: str
    expires_at: int
    url: str
    object: str = "job.token"


@router.post("/v1/jobs", status_code=202, openapi_extra=body_docs(JobRequest, JobsRequest), response_model=None)
async def submit_jobs(request: Request) -> Response:
    """Queue a chat or completion, or many of them with `jobs`: all or none. They go on whoever is connected."""
    services, order = services_of(request), await body_of(request, JobsRequest)
    repeat = repeat_of(request, order)
    orders = await job_orders.prepare(services, caller_of(request), order)
    if repeat is not None:
        repeat = replace(repeat, ttl_s=orders.longest_s)
    count = len(orders.lifetimes)
    entered = await services.entrance.enter(caller_of(request).tenant, orders.prepared, repeat, requests=count)
    jobs = entered.prepared.envelopes
    await services.submitter.submit(jobs, [Terms(lifetime) for lifetime in orders.lifetimes], keep=repeat is not None)
    request.scope["state"]["job_id"] = jobs[0].id
    headers = dict(entered.headers)
    if not orders.many:
        headers["location"] = f"/v1/jobs/{jobs[0].id}"
    if entered.replayed and not orders.many:
        return await _shown(services, await services.store.get(jobs[0].id), 202, headers)
    if entered.replayed:
        entries = await services.index.entries([JobId.parse(job.id) for job in jobs])
        shown = [job_view.of_entry(entry) for entry in entries]
    else:
        pairs = zip(jobs, orders.lifetimes, strict=True)
        shown = [job_view.of_envelope(job, life, _wait_s(services, job, life)) for job, life in pairs]
    body = JobListBody(shown, jobs[0].id, jobs[-1].id) if orders.many else shown[0]
    return Response(wire_format.encode(body), status_code=202, media_type=_JSON, headers=headers)


@router.get("/v1/jobs", response_model=None)
async def list_jobs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100, description="most jobs of a page")] = 20,
    after: Annotated[
        str | None, Query(max_length=256, description="the job, or `next`, that a page goes on behind")
    ] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="by when they were submitted")] = "desc",
    status: Annotated[str | None, Query(max_length=256, description="one, or several with commas between them")] = None,
    model: Annotated[str | None, Query(max_length=256)] = None,
    pool: Annotated[str | None, Query(max_length=96)] = None,
    job_class: Annotated[Literal["high", "normal", "batch"] | None, Query(alias="class")] = None,
    created_after: Moment = None,
    created_before: Moment = None,
) -> Response:
    """The caller's jobs, the newest first, without results. A page can be short and not be the last: see `next`."""
    services = services_of(request)
    await services.catalogue.refresh_if_empty()
    pools = [known for known in services.catalogue.pools if pool in (None, known.card.pool)]
    if pool is not None and not pools:
        raise ModelNotFoundError("pool: no pool has this name", param="pool")
    wanted = job_list.Filter(_statuses(status), model, job_class)
    where = job_list.span(after, created_after, created_before, ascending=order == "asc")
    page = await job_list.page(services.index, caller_of(request).tenant, pools, wanted, where, limit)
    jobs = [job_view.of_entry(entry) for entry in page.entries]
    first, last = (jobs[0].id, jobs[-1].id) if jobs else (None, None)
    return _json(JobListBody(jobs, first, last, page.next is not None, page.next))


@router.get("/v1/jobs/{job_id}", response_model=None)
async def get_job(request: Request, job_id: Id, wait: Wait = 0.0) -> Response:
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
    job_id: Id,
    after: After = None,
    token: Annotated[str | None, Query(max_length=256, description="in place of a key, see `/token`")] = None,
    last_event_id: Annotated[str | None, Header(description="sequence number of the last event received")] = None,
) -> Response:
    """A job's frames as server-sent events, from the first or behind a sequence number, up to the last."""
    services = services_of(request)
    needed = request.scope["state"].get("needs_token", False)
    if needed or (token is not None and "authorization" not in request.headers):
        await services.tokens.check(job_id, token or "")
    elif caller_of(request).authenticated:
        await _own(request, job_id)
    start = after or 0
    if last_event_id is not None and last_event_id.strip():
        start = _sequence_number(last_event_id.strip())
    return JobEventsResponse(services, job_id, start, reference_of(request))


@router.post("/v1/jobs/{job_id}/token", openapi_extra=body_docs(TokenRequest, required=False), response_model=None)
async def create_token(request: Request, job_id: Id) -> Response:
    """A token with which a browser reads this job's events, and nothing else, for a while."""
    services = services_of(request)
    await _own(request, job_id)
    asked = (await body_of(request, TokenRequest)).expires_in_s if await request.body() else None
    seconds = TOKEN_S if asked is None else asked
    if asked is not None and asked > services.settings.max_token_s:
        raise InvalidRequestError(
            f"expires_in_s: at most {services.settings.max_token_s:g} is allowed", param="expires_in_s"
        )
    token, expires = await services.tokens.make(job_id, min(seconds, services.settings.max_token_s))
    body = _Token(token, expires, f"/v1/jobs/{job_id}/events?token={token}")
    return _json(body, {"cache-control": "no-store"})


@router.post("/v1/jobs/{job_id}/cancel", response_model=None)
async def cancel_job(request: Request, job_id: Id) -> Response:
    """End a job: one that waits here and now, a running one within a step or two. Harmless to repeat."""
    services = services_of(request)
    await _own(request, job_id)
    if await services.store.cancel(job_id) is None:
        raise JobNotFoundError("no job has this id", param="id")
    return await _shown(services, await services.store.get(job_id))


@router.delete("/v1/jobs/{job_id}", response_model=None)
async def delete_job(request: Request, job_id: Id) -> Response:
    """Remove a job with its result and events. One that waits is cancelled; one that runs has to be cancelled first."""
    await _own(request, job_id)
    await services_of(request).store.delete(job_id)
    return _json({"id": job_id, "object": "job", "deleted": True})


async def _shown(
    services: Services, view: JobView, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """The job as an answer; one with a large result is written in a thread."""
    pool = services.catalogue.known(JobId.parse(view.id).pool)
    hidden = frozenset[int]() if pool is None else pool.encoder.special_ids
    wait_s, callback = _wait_of(services, view), await services.callbacks.of(view)

    def shown() -> bytes:
        return wire_format.encode(job_view.of_view(view, hidden, wait_s, callback))

    small = view.result is None or len(view.result) <= _INLINE_BYTES
    body = shown() if small else await services.in_thread(shown)
    return Response(body, status_code=status_code, media_type=_JSON, headers=headers)


def _json(body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(wire_format.encode(body), media_type=_JSON, headers=headers)


def _wait_s(services: Services, envelope: Envelope, lifetime: Lifetime) -> float | None:
    """About how many seconds until a job starts that was queued now."""
    return services.wait_s(envelope.id, envelope.job_class, delay_s=lifetime.delay_s)


def _wait_of(services: Services, view: JobView) -> float | None:
    """The same of one that waits already; None for others."""
    if view.status == "delayed":
        return services.wait_s(view.id, view.envelope.job_class, delay_s=max(0.0, view.start_ms / 1e3 - time.time()))
    if view.status == "queued":
        return services.wait_s(view.id, view.envelope.job_class, own_tokens=view.envelope.cost_tokens)
    return None


def _statuses(text: str | None) -> frozenset[JobStatus]:
    if text is None:
        return frozenset()
    names = [name.strip() for name in text.split(",")]
    if not all(name in get_args(JobStatus) for name in names):
        raise InvalidRequestError(f"status: must be of {', '.join(get_args(JobStatus))}", param="status")
    return frozenset(cast(JobStatus, name) for name in names)


async def _own(request: Request, job_id: str) -> None:
    """Pass only if the job is the caller's.

    Raises:
        JobNotFoundError: it is not, or there is none.
    """
    caller = caller_of(request)
    owner = await services_of(request).store.owner(job_id)
    if caller.authenticated and owner != caller.tenant:
        raise JobNotFoundError("no job has this id", param="id")


async def _visible(request: Request, job_id: str) -> JobView:
    """The job, if it is the caller's; see `_own`."""
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
