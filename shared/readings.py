"""Answers of the Lua scripts, and fields of what they keep, as plain types."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast, get_args

from shared.errors import ForeignDataError, OverloadedError, ProtocolError, ServiceUnavailableError
from shared.jobs import (
    DeadLetter,
    JobEntry,
    JobView,
    LaneLoad,
    Owned,
    Publication,
    Pulled,
    PulledJob,
    ReplicaWait,
    Submitted,
)
from shared.keys import CLASSES, JobId
from shared.protocol import Envelope, ErrorInfo, Head, JobClass, JobStatus, decode, decode_error

#: Seconds after which it makes sense to submit again to a lane that is full.
QUEUE_FULL_RETRY_S: Final = 1.0
#: The same where replicas do not keep up.
REPLICAS_RETRY_S: Final = 1.0
#: Fields of a job's hash that `parse_view` reads.
VIEW_FIELDS: Final = (
    "status", "env", "epoch", "attempts", "seq", "cancel", "submitted_us", "started_us", "finished_us", "deadline_ms",
    "start_ms", "tenant", "result", "attachment",
)  # fmt: skip
#: Fields of a job's hash that `parse_entry` reads.
ENTRY_FIELDS: Final = (
    "status", "head", "class", "attempts", "seq", "cancel", "submitted_us", "started_us", "finished_us", "deadline_ms",
    "start_ms",
)  # fmt: skip
#: Fields of a lane's stats that `parse_load` reads.
LOAD_FIELDS: Final = (
    "queued_jobs",
    "queued_tokens",
    "running_jobs",
    "running_tokens",
    "ended_jobs",
    "ended_tokens",
    "delayed_jobs",
    "delayed_tokens",
)
#: Of a 64-bit number, its sign included.
_MAX_DIGITS: Final = 20
_STATUSES: Final[dict[bytes, JobStatus]] = {status.encode(): status for status in get_args(JobStatus)}
_PUBLICATIONS: Final = (Publication.FINE, Publication.CANCELLED, Publication.FENCED)


@dataclass(slots=True)
class PullAnswer:
    """`pull` as it came: `broken` are jobs, now the caller's, whose envelopes do not decode."""

    token: bytes = b""
    pulled: Pulled = field(default_factory=Pulled)
    broken: list[tuple[Owned, ProtocolError]] = field(default_factory=list)


def parse_submit(answer: Any, wait: ReplicaWait | None = None) -> Submitted:
    """The answer of `submit`, called with the same `wait`.

    Raises:
        OverloadedError: a limit of the lane was reached; nothing was written.
        ServiceUnavailableError: too few replicas have the job. It is in the queue all the same.
    """
    replicas = 0
    if wait is not None:
        answer, replicas = answer
    code, jobs, tokens = answer
    if code == 2:
        raise OverloadedError(
            f"the queue is full: {jobs} jobs with {tokens} tokens are waiting", retry_after=QUEUE_FULL_RETRY_S
        )
    if wait is not None and replicas < wait.replicas:
        raise ServiceUnavailableError(
            f"{replicas} replicas of Redis have the job, {wait.replicas} must", retry_after=REPLICAS_RETRY_S
        )
    return Submitted(duplicate=code == 1, queued_jobs=jobs, queued_tokens=tokens)


def parse_pull(answer: Any) -> PullAnswer:
    """The answer with its envelopes decoded."""
    if answer is None:
        return PullAnswer()
    token, jobs, ended, buried, reclaimed, alone_waiting = answer
    parsed = PullAnswer(token=token)
    for job in jobs:
        try:
            parsed.pulled.jobs.append(_pulled_job(job))
        except ProtocolError as error:
            parsed.broken.append((Owned(job[0].decode(), job[2]), error))
    for job_id, status in zip(ended[::2], ended[1::2], strict=True):
        parsed.pulled.ended[job_id.decode()] = parse_status(status)
    parsed.pulled.buried = [job_id.decode() for job_id in buried]
    parsed.pulled.reclaimed = reclaimed
    parsed.pulled.alone_waiting = alone_waiting
    return parsed


def _pulled_job(job: Sequence[Any]) -> PulledJob:
    job_id, data, epoch, attempts, seq, deadline_ms, queue_us, suspect, alone, lost_by, since_us = job
    envelope = decode(data, Envelope)
    if envelope.id != job_id.decode():
        raise ProtocolError("the envelope is that of another job")
    return PulledJob(
        envelope=envelope,
        epoch=epoch,
        attempts=attempts,
        last_seq=seq,
        deadline_ms=deadline_ms,
        queue_ms=queue_us / 1000,
        suspect=bool(suspect),
        alone=bool(alone),
        lost_by=lost_by.decode(errors="replace"),
        since_ms=max(0.0, since_us / 1000),
    )


def parse_publication(answer: Any) -> Publication:
    """Answer of `publish` and `renew`, which may be an error that concerns this job or its node alone."""
    if isinstance(answer, ServiceUnavailableError):
        return Publication.AWAY
    return Publication.BROKEN if isinstance(answer, ForeignDataError) else _PUBLICATIONS[answer]


def parse_id(text: str) -> JobId:
    """A job id out of a message.

    Raises:
        ProtocolError: it is malformed.
    """
    job_id = JobId.match(text)
    if job_id is None:
        raise ProtocolError("a job id is malformed")
    return job_id


def parse_status(data: bytes) -> JobStatus:
    """A job's status as the hash has it. Raises ForeignDataError for a word that is none."""
    status = _STATUSES.get(data)
    if status is None:
        raise ForeignDataError("a job has a status that this version does not know")
    return status


def parse_frame(fields: dict[bytes, bytes]) -> bytes:
    """The encoded frame of a log's entry. Raises ForeignDataError for an entry without one."""
    if b"f" not in fields:
        raise ForeignDataError("a log has an entry that is no frame")
    return fields[b"f"]


def parse_load(values: Sequence[bytes | None]) -> LaneLoad:
    """Counters as `LOAD_FIELDS` of a lane's stats. Raises ForeignDataError if they are no numbers."""
    return LaneLoad(*(parse_number(value) for value in values))


def parse_view(job_id: str, values: Sequence[bytes | None]) -> JobView:
    """A job as `VIEW_FIELDS` of its hash. Raises ProtocolError if its envelope or a number does not decode."""
    status, envelope, epoch, attempts, seq, cancel, submitted, started, finished, deadline, *more = values
    start, tenant, result, attachment = more
    return JobView(
        id=job_id,
        status=parse_status(status or b""),
        envelope=decode(envelope or b"", Envelope),
        epoch=parse_number(epoch),
        attempts=parse_number(attempts),
        last_seq=parse_number(seq),
        cancel_requested=cancel == b"1",
        submitted_ms=parse_number(submitted) // 1000,
        started_ms=parse_number(started) // 1000,
        finished_ms=parse_number(finished) // 1000,
        deadline_ms=parse_number(deadline),
        start_ms=parse_number(start),
        tenant=(tenant or b"").decode(errors="replace"),
        result=result,
        attachment=attachment,
    )


def parse_entry(job_id: str, values: Sequence[bytes | None]) -> JobEntry:
    """A job as `ENTRY_FIELDS` of its hash. Raises ProtocolError if its head or a number does not decode."""
    status, head, job_class, attempts, seq, cancel, submitted, started, finished, deadline, start = values
    name = (job_class or b"").decode(errors="replace")
    if name not in CLASSES:
        raise ForeignDataError("a job has a class that this version does not know")
    return JobEntry(
        id=job_id,
        status=parse_status(status or b""),
        job_class=cast(JobClass, name),
        head=decode(head or b"", Head),
        attempts=parse_number(attempts),
        last_seq=parse_number(seq),
        cancel_requested=cancel == b"1",
        submitted_ms=parse_number(submitted) // 1000,
        started_ms=parse_number(started) // 1000,
        finished_ms=parse_number(finished) // 1000,
        deadline_ms=parse_number(deadline),
        start_ms=parse_number(start),
    )


def parse_dead_letter(entry: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    """An entry of the stream of dead letters. What of it does not read is left out: one must not hide the others."""
    error: ErrorInfo | None = None
    attempts = 0
    with suppress(ProtocolError):
        error = decode_error(fields[b"error"]) if b"error" in fields else None
    with suppress(ForeignDataError):
        attempts = parse_number(fields.get(b"attempts"))
    return DeadLetter(
        entry=entry.decode(),
        job_id=fields.get(b"id", b"").decode(errors="replace"),
        reason=fields.get(b"reason", b"").decode(errors="replace"),
        attempts=attempts,
        error=error,
        envelope=fields.get(b"env", b""),
    )


def parse_number(value: bytes | None) -> int:
    """A field that holds a number, 0 where there is none. Raises ForeignDataError for anything else."""
    if not value:
        return 0
    if len(value) > _MAX_DIGITS or not value.removeprefix(b"-").isdigit():
        raise ForeignDataError("Redis holds something else where a number should be")
    return int(value)
