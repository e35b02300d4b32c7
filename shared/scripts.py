"""The Lua scripts: loading them, and calls with their keys and arguments; `readings` has the answers as plain types.

A call is a value, so that one of them runs alone or in a pipeline, from async or from sync code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Final

import msgspec

from shared import keys
from shared.errors import ForeignDataError, ProtocolError
from shared.jobs import (
    Ending,
    LaneLimits,
    Lease,
    Lifetime,
    Owned,
    Publish,
    PullBudget,
    QueuedLimits,
    RateLimits,
    ReplicaWait,
)
from shared.keys import CLASSES, JobId
from shared.lora.files import IDENTITY_PATTERN
from shared.protocol import Card, Envelope, Head, encode
from shared.readings import parse_id

#: Days that usage is kept, where nothing else is said.
USAGE_DAYS: Final = 90
#: Of adapters, where the caller has no limit.
_ANY_NUMBER: Final = 2**31


@dataclass(frozen=True, slots=True)
class Script:
    """A script as the server gets it. `sha` is its SHA-1, by which it is called."""

    name: str
    text: str
    sha: str


@dataclass(frozen=True, slots=True)
class Call:
    """One command for the node that serves `key`.

    Attributes:
        command: complete; of a script, the EVALSHA.
        key: any of the command's keys, or one whose node is to answer a command without keys.
        script: sent as a text where the node does not know it.
        behind: a command that is sent right behind on the same connection. The answer is then a pair.
    """

    command: tuple[Any, ...]
    key: str
    script: Script | None = None
    behind: tuple[Any, ...] | None = None

    @property
    def lane(self) -> str:
        """The key's hash tag: calls of one lane go to one node."""
        before, brace, rest = self.key.partition("{")
        tag, end, _ = rest.partition("}")
        return tag if brace and end else before


@cache
def load(name: str) -> Script:
    """The script `lua/<name>.lua`: its `#!lua` line, then the common prelude, then the rest.

    A line `-- include <file>` stands for that file.

    Raises:
        FileNotFoundError: there is no such script.
    """
    folder = files("shared").joinpath("lua")

    def read(file: str) -> str:
        return folder.joinpath(file).read_text("utf-8")

    header, _, body = read(f"{name}.lua").partition("\n")
    body = re.sub(r"^-- include (\S+)$", lambda line: read(line[1]), body, flags=re.MULTILINE)
    text = f"{header}\n{read('_lib.lua')}{body}"
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def submit(
    envelope: Envelope,
    lifetime: Lifetime,
    limits: LaneLimits,
    wait: ReplicaWait | None = None,
    attachment: bytes = b"",
    usage_days: int = USAGE_DAYS,
) -> Call:
    """Accept a job. With `wait`, the answer comes once so many replicas have it, or the time is up.

    `attachment` is kept with the job for its submitter, what it used for `usage_days` behind the day of its end.

    Raises:
        ProtocolError: the envelope is too large, or its id, class or adapter's identity is malformed.
    """
    job_id = parse_id(envelope.id)
    if envelope.job_class not in CLASSES:
        raise ProtocolError("the envelope's class is none of high, normal, batch")
    if envelope.adapter_identity is not None and IDENTITY_PATTERN.fullmatch(envelope.adapter_identity) is None:
        raise ProtocolError("the envelope's adapter_identity has not 32 hexadecimal digits")
    bucket = keys.bucket_of(envelope.tenant)
    queue = keys.queue(job_id.pool, job_id.lane, envelope.job_class, bucket)
    call = _call(
        "submit",
        [
            keys.job(job_id),
            queue,
            keys.stats(job_id.pool, job_id.lane),
            keys.delayed(job_id.pool, job_id.lane),
            keys.tenant_jobs(job_id.pool, job_id.lane, envelope.tenant),
            keys.expiring(job_id.pool, job_id.lane),
        ],
        [
            envelope.id,
            encode(envelope),
            envelope.job_class,
            bucket,
            envelope.cost_tokens,
            envelope.sequences,
            len(envelope.prompt_token_ids),
            _ms(lifetime.deadline_s),
            _ms(lifetime.max_run_s),
            _ms(lifetime.retention_s),
            -1 if limits.max_queued_jobs is None else limits.max_queued_jobs,
            -1 if limits.max_queued_tokens is None else limits.max_queued_tokens,
            int(envelope.callback_url is not None),
            keys.wake(job_id.pool),
            job_id.lane,
            envelope.adapter_identity or "",
            _ms(lifetime.delay_s) if lifetime.delay_s > 0 else 0,
            envelope.tenant,
            encode(Head.of(envelope)),
            attachment,
            f"{envelope.key}|{envelope.adapter or envelope.model}",
            usage_days,
            f"{envelope.weight:g}",
        ],
    )
    return call if wait is None else replace(call, behind=("WAIT", wait.replicas, wait.timeout_ms))


def pull(pool: str, lane: int, owner: str, budget: PullBudget, lease: Lease, seen: bytes) -> Call:
    """Take jobs from a lane. `seen` is the token of the last answer that arrived."""
    names = _pull_keys(pool, lane)
    return _call(
        "pull",
        [names[0], keys.last_pull(pool, lane, owner), *names[1:]],
        [
            owner,
            seen,
            lease.lease_ms,
            lease.max_attempts,
            int(lease.reclaim),
            int(lease.charge),
            int(budget.idle),
            budget.suspects,
            budget.max_job_tokens,
            *(budget.sequences.get(c, 0) for c in CLASSES),
            *(budget.tokens.get(c, 0) for c in CLASSES),
            _ANY_NUMBER if budget.more_adapters is None else budget.more_adapters,
            *sorted(budget.adapters),
        ],
    )


def publish(item: Publish) -> Call:
    """Append frames to a job's log, and end it where `ending` is set."""
    job_id = parse_id(item.job_id)
    job_key, events, stats, _, outbox = _job_keys(job_id)
    ending = () if item.ending is None else _ending(item.ending)
    return _call(
        "publish",
        [job_key, events, stats, outbox],
        [item.job_id, item.owner, item.epoch, item.first_seq, len(item.frames), *item.frames, *ending],
    )


def _ending(ending: Ending) -> tuple[Any, ...]:
    used = ending.usage
    tokens = () if used is None else (used.prompt_tokens, used.cached_tokens, used.completion_tokens)
    return ending.status, ending.result, *tokens


def renew(owner: str, job: Owned) -> Call:
    """Keep a job for another lease."""
    return _call("renew", [keys.job(parse_id(job.job_id))], [owner, job.epoch])


def release(owner: str, job: Owned) -> Call:
    """Give a job back."""
    job_id = parse_id(job.job_id)
    job_key, events, stats, _, outbox = _job_keys(job_id)
    return _call(
        "release",
        [job_key, keys.resume(job_id.pool, job_id.lane), stats, events, outbox],
        [job.job_id, owner, job.epoch, keys.wake(job_id.pool), job_id.lane],
    )


def cancel(job_id: JobId) -> Call:
    """End a queued job, flag a running one."""
    job_key, events, stats, _, outbox = _job_keys(job_id)
    message = msgspec.msgpack.encode({"op": "cancel", "id": str(job_id)})
    return _call("cancel", [job_key, events, stats, outbox], [str(job_id), keys.control(job_id.pool), message])


def delete(job_id: JobId) -> Call:
    """Remove a job that does not run."""
    job_key, events, stats, dead, outbox = _job_keys(job_id)
    webhook, undelivered = keys.webhook(job_id), keys.webhooks(job_id.pool, job_id.lane, "undelivered")
    return _call("delete", [job_key, events, stats, outbox, dead, webhook, undelivered], [str(job_id)])


def due(pool: str, lane: int, count: int) -> Call:
    """Queue delayed jobs whose time has come."""
    return _call("due", [keys.stats(pool, lane), keys.delayed(pool, lane)], [count, keys.wake(pool), lane])


def bury(owner: str, job: Owned, error: ProtocolError) -> Call:
    """Give up a job whose envelope does not decode, or whose log cannot be written."""
    reason, message = "envelope does not decode", "the job's envelope cannot be read by this version"
    if isinstance(error, ForeignDataError):
        reason, message = "its data is broken", "what the queue holds of the job is broken"
    code = error.error_code or "protocol_error"
    return _call("bury", list(_job_keys(parse_id(job.job_id))), [job.job_id, owner, job.epoch, reason, message, code])


def forget(pool: str, lane: int, owner: str) -> Call:
    """Delete a consumer where nothing is pending on it."""
    return _call("forget", [keys.last_pull(pool, lane, owner), *keys.lane_streams(pool, lane)], [owner])


def forget_dead(pool: str, lane: int, live: Sequence[str]) -> Call:
    """Delete the consumers of workers that do not live, where nothing is pending on them."""
    return _call("forget_dead", keys.lane_streams(pool, lane), live)


def orphan(pool: str, lane: int, owner: str, max_attempts: int, *, charge: bool, count: int) -> Call:
    """Queue what a dead worker held of a lane again, up to `count` jobs of each stream."""
    names = _pull_keys(pool, lane)
    return _call(
        "orphan",
        [names[0], keys.last_pull(pool, lane, owner), *names[1:]],
        [owner, max_attempts, int(charge), count, keys.wake(pool), lane],
    )


def join(pool: str, agreement: str, card: bytes, bundle: bytes, replace: str) -> Call:
    """Write the pool's card if there is none, or if it is the one that may be replaced."""
    return _call(
        "join", [keys.card(pool), keys.tokenizer(pool), keys.workers(pool)], [agreement, card, bundle, replace]
    )


def heartbeat(pool: str, owner: str, info: bytes, ttl_ms: int) -> Call:
    """A worker's sign of life."""
    return _call("heartbeat", [keys.worker(pool, owner), keys.workers(pool)], [owner, info, ttl_ms])


def sweep(pool: str, lane: int, stream: str, first: str, count: int, slack_ms: int) -> Call:
    """End what is too late in a page of one queue stream."""
    _, class_and_bucket = stream.split(":q:")
    job_class, _, bucket = class_and_bucket.partition(":")
    place = [job_class, bucket] if bucket else ["", ""]
    return _call("sweep", [keys.stats(pool, lane), stream, keys.outbox(pool, lane)], [*place, first, count, slack_ms])


def recount(pool: str, lane: int) -> Call:
    """Make a lane's counters agree with its streams."""
    return _call("recount", [keys.stats(pool, lane), *keys.lane_streams(pool, lane)], [])


def restore(job_id: JobId, stream: str) -> Call:
    """Put a live job back into the stream that its hash names, if that does not hold it."""
    tag = keys.lane_tag(job_id.pool, job_id.lane)
    return _call(
        "restore",
        [keys.job(job_id), f"{tag}:{stream}", keys.stats(job_id.pool, job_id.lane)],
        [str(job_id), stream, keys.wake(job_id.pool), job_id.lane],
    )


def claim(record: str, content: bytes, ttl_s: float) -> Call:
    """Enter what an idempotency key stands for."""
    return _call("claim", [record], [content, _ms(ttl_s)])


def spend(tenant: str, limits: RateLimits, requests: int, tokens: int) -> Call:
    """Count against a tenant's limits."""
    most = [-1 if limit is None else limit for limit in (limits.requests, limits.tokens)]
    return _call("spend", [keys.rate(tenant)], [*most, requests, tokens])


def enter(tenant: str, limits: QueuedLimits, jobs: Mapping[str, int], ttl_s: float) -> Call:
    """Count jobs, with their costs, as queued ones of a tenant."""
    most = [-1 if limit is None else limit for limit in (limits.jobs, limits.tokens)]
    return _call("enter", [keys.queued(tenant)], [*most, _ms(ttl_s), *(part for job in jobs.items() for part in job)])


def leave(tenant: str, job_ids: Sequence[str | bytes]) -> Call:
    """Count jobs as queued no longer."""
    return _call("leave", [keys.queued(tenant)], job_ids)


def agreement(card: Card) -> str:
    """What all members of a pool have in common."""
    adapters = f":lora{card.max_lora_rank}" if card.max_lora_rank else ""
    return f"{card.v}:{card.digest}:{card.lanes}:{card.max_model_len}:{card.vocab_size}{adapters}"


def _job_keys(job_id: JobId) -> tuple[str, str, str, str, str]:
    tag = keys.lane_tag(job_id.pool, job_id.lane)
    return f"{tag}:job:{job_id}", f"{tag}:ev:{job_id}", f"{tag}:stats", f"{tag}:dead", f"{tag}:outbox"


@lru_cache(maxsize=1024)
def _pull_keys(pool: str, lane: int) -> tuple[str, ...]:
    """Stats, resume, the class streams in order, dead letters, outbox."""
    return (
        keys.stats(pool, lane),
        *keys.lane_streams(pool, lane),
        keys.dead(pool, lane),
        keys.outbox(pool, lane),
    )


def _call(name: str, names: Sequence[str], arguments: Sequence[Any]) -> Call:
    script = load(name)
    return Call(("EVALSHA", script.sha, len(names), *names, *arguments), names[0], script)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
