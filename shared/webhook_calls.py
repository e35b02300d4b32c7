"""The scripts that move webhooks on: their calls, and their answers as plain types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from shared import keys
from shared.errors import ForeignDataError
from shared.keys import JobId
from shared.protocol import JobStatus
from shared.readings import parse_number, parse_status
from shared.scripts import Call, load

#: `waiting` for the end of its job; `pending`; then how it ended. `gone`: the receiver answered 410.
DeliveryState = Literal["waiting", "pending", "delivered", "gone", "failed"]
#: What became of one try. `later`: it was not made after all.
TryOutcome = Literal["delivered", "gone", "retry", "later"]

_STATES: Final = {state.encode(): state for state in get_args(DeliveryState)}
_FIELDS: Final = (
    "state", "url", "attempts", "owed_ms", "last_ms", "last_status", "last_error", "next_ms", "until_ms", "ended_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Delivery:
    """How far the delivery of a job's webhook is. Times are Unix milliseconds of Redis's clock; 0 where not yet.

    Attributes:
        attempts: tries so far, one that is under way included.
        owed_ms: when the job ended.
        last_ms: when the last try began; `last_status` of its answer, None where there was none; `last_error` in words.
        next_ms: of the next try; while one is under way, of the next if nothing is heard of it.
        until_ms: when it is given up.
    """

    job_id: str
    state: DeliveryState
    url: str
    attempts: int = 0
    owed_ms: int = 0
    last_ms: int = 0
    last_status: int | None = None
    last_error: str | None = None
    next_ms: int = 0
    until_ms: int = 0
    ended_ms: int = 0


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A job that has ended and whose webhook nobody has taken over.

    Attributes:
        again: it is to be sent once more.
        deleted: what is left of a job that was deleted meanwhile, by name of its hash's field; None where it is there.
    """

    pool: str
    lane: int
    entry: bytes
    job_id: str
    status: JobStatus
    again: bool = False
    deleted: Mapping[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that is the caller's to try, once. `trace`: the `traceparent` of who submitted the job, or empty."""

    job_id: str
    attempt: int
    url: str
    tenant: str
    type: str
    body: bytes
    trace: str


@dataclass(slots=True)
class Claims:
    """Answer of `claim`. `given_up`: ids of jobs whose webhook was due, and its time over."""

    claimed: list[Claimed] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LaneSurvey:
    """What a lane owes: entries in its outbox, deliveries whose time has come, all that are not delivered yet, and the
    end of the job that has waited longest (Unix ms; None where none waits)."""

    pool: str
    lane: int
    outbox: int
    due: int
    owed: int
    oldest_ms: int | None


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a webhook is tried, and that the record of one that was given up is kept behind them."""

    try_s: float
    keep_s: float

    @property
    def try_ms(self) -> int:
        """Milliseconds."""
        return max(1, round(self.try_s * 1e3))

    @property
    def keep_ms(self) -> int:
        """Milliseconds."""
        return max(1, round(self.keep_s * 1e3))


def take(entry: OutboxEntry, fields: Mapping[str, str | bytes], owed_ms: int, patience: Patience) -> Call:
    """Take a webhook over from the outbox."""
    job_id = JobId.parse(entry.job_id)
    content = [part for pair in fields.items() for part in pair]
    return _call(
        "webhook_take",
        [keys.job(job_id), keys.outbox(entry.pool, entry.lane), keys.webhook(job_id), *_sets(entry.pool, entry.lane)],
        [
            entry.entry,
            entry.job_id,
            int(entry.again),
            patience.try_ms,
            patience.keep_ms,
            owed_ms,
            *content,
        ],
    )


def claim(pool: str, lane: int, most: int, lease_s: float, patience: Patience) -> Call:
    """Take deliveries whose time has come."""
    return _call("webhook_claim", _sets(pool, lane), [most, round(lease_s * 1e3), patience.keep_ms])


def done(
    claimed: Claimed, outcome: TryOutcome, status: int | None, error: str, delay_s: float, patience: Patience
) -> Call:
    """Say how a try ended."""
    job_id = JobId.parse(claimed.job_id)
    return _call(
        "webhook_done",
        [keys.webhook(job_id), *_sets(job_id.pool, job_id.lane)],
        [
            claimed.job_id,
            claimed.attempt,
            outcome,
            "" if status is None else status,
            error,
            round(delay_s * 1e3),
            patience.keep_ms,
        ],
    )


def again(job_id: JobId, patience: Patience) -> Call:
    """Begin a delivery anew."""
    return _call(
        "webhook_again",
        [keys.webhook(job_id), *_sets(job_id.pool, job_id.lane)],
        [str(job_id), patience.try_ms, patience.keep_ms],
    )


def survey(pool: str, lane: int, now_ms: int) -> list[Call]:
    """The commands whose answers `parse_survey` reads."""
    outbox = keys.outbox(pool, lane)
    due, owed, _ = _sets(pool, lane)
    commands: list[tuple[Any, ...]] = [
        ("XLEN", outbox),
        ("XRANGE", outbox, "-", "+", "COUNT", 1),
        ("ZCOUNT", due, "-inf", now_ms),
        ("ZCARD", owed),
        ("ZRANGE", owed, 0, 0, "WITHSCORES"),
    ]
    return [Call(command, command[1]) for command in commands]


def parse_survey(pool: str, lane: int, answers: list[Any]) -> LaneSurvey:
    """The answers to `survey`."""
    waiting, first, due, owed, oldest = answers
    times = [int(entry.partition(b"-")[0]) for entry, _ in first]
    times += [int(float(oldest[1]))] if oldest else []
    return LaneSurvey(pool, lane, int(waiting), int(due), int(owed) + int(waiting), min(times, default=None))


def parse_entry(pool: str, lane: int, entry: bytes, fields: Mapping[bytes, bytes]) -> OutboxEntry | None:
    """An entry of the outbox; None for one that nobody here wrote."""
    job_id = JobId.match(fields.get(b"id", b"").decode(errors="replace"))
    try:
        status = parse_status(fields.get(b"status", b""))
    except ForeignDataError:
        return None
    if job_id is None or (job_id.pool, job_id.lane) != (pool, lane):
        return None
    deleted = fields if fields.get(b"deleted") == b"1" else None
    return OutboxEntry(pool, lane, entry, str(job_id), status, fields.get(b"again") == b"1", deleted)


def parse_claims(answer: Any) -> Claims:
    """The answer of `claim`."""
    claims = Claims()
    for job_id, attempt, *rest in answer:
        if not rest:
            claims.given_up.append(_text(job_id))
            continue
        url, tenant, kind, body, trace = rest
        claims.claimed.append(
            Claimed(_text(job_id), int(attempt), _text(url), _text(tenant), _text(kind), body, _text(trace))
        )
    return claims


def read(job_id: JobId) -> Call:
    """The command whose answer `parse_delivery` reads."""
    return Call(("HMGET", keys.webhook(job_id), *_FIELDS), keys.webhook(job_id))


def parse_delivery(job_id: str, values: list[bytes | None]) -> Delivery | None:
    """The answer to `read`; None where there is no record.

    Raises:
        ForeignDataError: it is not one that was written here.
    """
    state, url, attempts, owed, last, status, error, following, until, ended = values
    if state is None:
        return None
    if state not in _STATES:
        raise ForeignDataError("a webhook has a state that this version does not know")
    return Delivery(
        job_id=job_id,
        state=_STATES[state],
        url=_text(url),
        attempts=parse_number(attempts),
        owed_ms=parse_number(owed),
        last_ms=parse_number(last),
        last_status=parse_number(status) if status else None,
        last_error=_text(error) or None,
        next_ms=parse_number(following),
        until_ms=parse_number(until),
        ended_ms=parse_number(ended),
    )


def _sets(pool: str, lane: int) -> list[str]:
    return [keys.webhooks(pool, lane, what) for what in ("due", "owed", "undelivered")]


def _call(name: str, names: list[str], arguments: list[Any]) -> Call:
    script = load(name)
    return Call(("EVALSHA", script.sha, len(names), *names, *arguments), names[0], script)


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
