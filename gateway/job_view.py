"""A job as the jobs API shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway import errors
from gateway.answers import Shape, from_result
from gateway.callbacks import CallbackBody, planned
from gateway.wire_format import UsageBody
from shared.jobs import JobEntry, JobView, Lifetime
from shared.protocol import FINAL_STATUSES, Envelope, JobClass, JobStatus, Result, Timings, decode


class JobError(msgspec.Struct, frozen=True):
    """Why a job failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class JobBody(msgspec.Struct, frozen=True, rename={"job_class": "class"}):
    """A job. Times are Unix seconds, null where not yet; `result` is the answer in the shape of its endpoint.
    `estimated_wait_s` is there while it waits, and something is known of the rate at which others end."""

    id: str
    kind: Literal["chat", "completion"]
    model: str
    adapter: str | None
    status: JobStatus
    job_class: JobClass
    created_at: int
    started_at: int | None = None
    finished_at: int | None = None
    deadline_at: int | None = None
    not_before: int | None = None
    estimated_wait_s: float | None = None
    attempts: int = 0
    last_seq: int = 0
    cancel_requested: bool = False
    request_id: str | None = None
    metadata: dict[str, str] = {}
    usage: UsageBody | None = None
    timings: Timings | None = None
    error: JobError | None = None
    result: msgspec.Raw | None = None
    callback: CallbackBody | None = None
    object: str = "job"


class JobListBody(msgspec.Struct, frozen=True):
    """Jobs of a list, without usage, timings, error, result and callback. `next` is for `after`."""

    data: Sequence[JobBody]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
    next: str | None = None
    object: str = "list"


def of_envelope(envelope: Envelope, lifetime: Lifetime, wait_s: float | None) -> JobBody:
    """A job that was queued a moment ago; `wait_s` as far as that can be estimated."""
    start = envelope.created_ms / 1000 + lifetime.delay_s
    return JobBody(
        id=envelope.id,
        kind=envelope.kind,
        model=envelope.model,
        adapter=envelope.adapter,
        status="delayed" if lifetime.delay_s > 0 else "queued",
        job_class=envelope.job_class,
        created_at=envelope.created_ms // 1000,
        deadline_at=int(start + lifetime.deadline_s),
        not_before=int(start) if lifetime.delay_s > 0 else None,
        estimated_wait_s=_rounded(wait_s),
        request_id=envelope.request_id,
        metadata=envelope.metadata,
        callback=planned(envelope.callback_url),
    )


def of_entry(entry: JobEntry) -> JobBody:
    """A job of a list."""
    return JobBody(
        id=entry.id,
        kind=entry.head.kind,
        model=entry.head.model,
        adapter=entry.head.adapter,
        status=entry.status,
        job_class=entry.job_class,
        created_at=entry.submitted_ms // 1000,
        started_at=entry.started_ms // 1000 or None,
        finished_at=entry.finished_ms // 1000 or None,
        deadline_at=entry.deadline_ms // 1000 or None,
        not_before=entry.start_ms // 1000 or None,
        attempts=entry.attempts,
        last_seq=entry.last_seq,
        cancel_requested=entry.cancel_requested,
        request_id=entry.head.request_id,
        metadata=entry.head.metadata,
    )


def of_view(
    view: JobView,
    hidden: frozenset[int] = frozenset(),
    wait_s: float | None = None,
    callback: CallbackBody | None = None,
) -> JobBody:
    """A job as the queue has it; `hidden` are the token ids that texts of its model do not show by default.

    Raises:
        ProtocolError: its result does not decode.
    """
    envelope = view.envelope
    result = None
    if view.result is not None and view.status in FINAL_STATUSES:
        result = decode(view.result, Result)
    return JobBody(
        id=view.id,
        kind=envelope.kind,
        model=envelope.model,
        adapter=envelope.adapter,
        status=view.status,
        job_class=envelope.job_class,
        created_at=view.submitted_ms // 1000,
        started_at=view.started_ms // 1000 or None,
        finished_at=view.finished_ms // 1000 or None,
        deadline_at=view.deadline_ms // 1000 or None,
        not_before=view.start_ms // 1000 or None,
        estimated_wait_s=_rounded(wait_s),
        attempts=view.attempts,
        last_seq=view.last_seq,
        cancel_requested=view.cancel_requested,
        request_id=envelope.request_id,
        metadata=envelope.metadata,
        usage=None if result is None else UsageBody.of([result.usage]),
        timings=None if result is None else result.timings,
        error=None if result is None else _error(view.id, result),
        result=None if result is None else msgspec.Raw(from_result(_shape(envelope, hidden), result)),
        callback=callback,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _shape(envelope: Envelope, hidden: frozenset[int]) -> Shape:
    return Shape(
        kind=envelope.kind,
        model=envelope.model,
        job_ids=[envelope.id],
        n=envelope.sampling.n,
        created=envelope.created_ms // 1000,
        logprobs=envelope.sampling.logprobs,
        prompt_logprobs=envelope.sampling.prompt_logprobs,
        hidden=hidden if envelope.sampling.skip_special_tokens else frozenset(),
    )


def _error(job_id: str, result: Result) -> JobError | None:
    if result.error is None:
        return None
    info = errors.public(errors.error_of(result.error, job_id), job_id)
    return JobError(info.message, info.type, info.param, info.code)
