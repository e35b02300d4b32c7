"""Builders of jobs, budgets and frames, and a recount of everything that the scripts keep exact."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import redis.asyncio

from shared import keys
from shared.jobs import Ending, Lease, Owned, Publish, PullBudget, PulledJob
from shared.keys import BUCKETS, CLASSES, GROUP, JobId
from shared.protocol import (
    FINAL_STATUSES,
    WIRE_VERSION,
    ChoiceFrame,
    ChoiceResult,
    Envelope,
    Frame,
    JobClass,
    JobStatus,
    Result,
    Usage,
    decode,
    encode,
)
from shared.sampling import SamplingParams

POOL = "pool"
#: Everything that is pending counts as idle past the lease.
NOW = Lease(lease_ms=0)
#: Nothing is ever taken from others.
KEEP = Lease(reclaim=False)


def envelope(
    *,
    lane: int = 0,
    tenant: str = "default",
    job_class: JobClass = "normal",
    prompt: int = 4,
    max_tokens: int = 6,
    n: int = 1,
    **fields: Any,
) -> Envelope:
    """A job of `n * (prompt + max_tokens)` tokens."""
    return Envelope(
        id=str(JobId.new(POOL, lane)),
        tenant=tenant,
        model=POOL,
        prompt_token_ids=list(range(1, prompt + 1)),
        sampling=SamplingParams(n=n, max_tokens=max_tokens, seed=1),
        job_class=job_class,
        **fields,
    )


def budget(
    sequences: int = 1000, tokens: int = 10**6, *, max_job: int = 10**6, idle: bool = False, suspects: int = 4
) -> PullBudget:
    """The same room in every class."""
    return PullBudget(dict.fromkeys(CLASSES, sequences), dict.fromkeys(CLASSES, tokens), max_job, idle, suspects)


def frame(epoch: int, seq: int, *, kind: str = "tokens", text: str = "x", **fields: Any) -> bytes:
    """A frame with one token, its id equal to `seq`."""
    delta = ChoiceFrame(offset=seq - 1, ids=[seq], text=text)
    return encode(Frame(v=WIRE_VERSION, seq=seq, epoch=epoch, kind=kind, choices=[delta], **fields))  # type: ignore[arg-type]


def tokens(job: PulledJob, owner: str, first: int, count: int = 1) -> Publish:
    """Frames in the middle of a job."""
    frames = [frame(job.epoch, seq) for seq in range(first, first + count)]
    return Publish(job.envelope.id, owner, job.epoch, first, frames)


def last(job: PulledJob, owner: str, seq: int, status: JobStatus = "completed") -> Publish:
    """The last frame of a job."""
    result = Result(id=job.envelope.id, status=status, choices=[ChoiceResult(text="x" * seq)], usage=Usage())
    frames = [frame(job.epoch, seq, kind="done", status=status)]
    return Publish(job.envelope.id, owner, job.epoch, seq, frames, Ending(status, encode(result)))


def owned(job: PulledJob) -> Owned:
    """The job as its owner renews and releases it."""
    return Owned(job.envelope.id, job.epoch)


async def check_lane(client: redis.asyncio.Redis, job_ids: list[str], lane: int = 0) -> None:
    """Recount a lane from its streams and hashes.

    Raises:
        AssertionError: counters, streams and hashes do not agree, a log has a gap, or a key of a job never expires.
    """
    r: Any = client
    entries = await _entries(r, lane)
    expected: dict[str, int] = {}
    live = 0
    for job_id in job_ids:
        parsed = JobId.parse(job_id)
        job = await r.hgetall(keys.job(parsed))
        status = job[b"status"].decode()
        unique, tenant = parsed.unique, job[b"tenant"].decode()
        assert await r.zscore(keys.tenant_jobs(POOL, lane, tenant), unique) == 0, "no list shows the job"
        expires = await r.zscore(keys.expiring(POOL, lane), f"{unique}:{tenant}")
        assert abs(expires - await r.pexpiretime(keys.job(parsed))) < 100, "it leaves the lists at another time"
        entry = entries.pop(job_id, None)
        if status in FINAL_STATUSES:
            assert entry is None, "an ended job has an entry"
            assert decode(job[b"result"], Result).status == status
        elif status == "delayed":
            assert entry is None, "a delayed job has an entry"
            assert await r.zscore(keys.delayed(POOL, lane), job_id) == int(job[b"start_ms"])
            _count(expected, job)
        else:
            live += 1
            stream, entry_id, consumer = entry or ("", "", None)
            assert stream.endswith(":" + job[b"stream"].decode()) and entry_id == job[b"entry"].decode()
            assert (consumer == job[b"owner"].decode()) == (status == "running")
            assert (consumer is None) == (status == "queued")
            _count(expected, job)
        log = [(entry, decode(f[b"f"], Frame)) for entry, f in await r.xrange(keys.events(parsed))]
        assert [f.seq for _, f in log] == list(range(1, int(job[b"seq"]) + 1)), "the log has a gap"
        assert all(entry.decode() == f"{f.seq}-0" for entry, f in log)
        assert [f.last for _, f in log] == [False] * (len(log) - 1) + [status in FINAL_STATUSES] * bool(log)
        assert all(a.epoch <= b.epoch for (_, a), (_, b) in pairwise(log))
        for name in (keys.job(parsed), keys.events(parsed)) if log else (keys.job(parsed),):
            assert await r.pttl(name) > 0, f"{name} never expires"
    assert not entries, "an entry without a job"
    assert sum(1 for _ in await _entries(r, lane)) == live
    counters = {k.decode(): int(v) for k, v in (await r.hgetall(keys.stats(POOL, lane))).items()}
    assert all(v > 0 for k, v in counters.items() if k.startswith("a:")), "a counter of an adapter is left"
    counters = {k: v for k, v in counters.items() if v and k.startswith(("delayed", "queued", "running", "a:"))}
    assert counters == expected


def _count(expected: dict[str, int], job: dict[bytes, bytes]) -> None:
    status, place = job[b"status"].decode(), f":{job[b'class'].decode()}:{job[b'bucket'].decode()}"
    for name, amount in (("jobs", 1), ("tokens", int(job[b"cost"]))):
        for field in (f"{status}_{name}", f"{status}_{name}{place}"):
            expected[field] = expected.get(field, 0) + amount
    if b"adapter" in job:
        field = f"a:{job[b'adapter'].decode()}"
        expected[field] = expected.get(field, 0) + 1


async def _entries(r: Any, lane: int) -> dict[str, tuple[str, str, str | None]]:
    """By job id: stream, entry, and the consumer that it is pending on."""
    found: dict[str, tuple[str, str, str | None]] = {}
    for stream in keys.lane_streams(POOL, lane):
        if not await r.exists(stream):
            continue
        assert await r.pttl(stream) > 0
        if not await r.xlen(stream) and not await r.xinfo_groups(stream):  # as good as none
            continue
        pending = {p["message_id"]: p["consumer"] for p in await r.xpending_range(stream, GROUP, "-", "+", 10**6)}
        for entry, fields in await r.xrange(stream):
            consumer = pending.pop(entry, None)
            job_id = fields[b"id"].decode()
            assert job_id not in found, "a job has two entries"
            found[job_id] = (stream, entry.decode(), None if consumer is None else consumer.decode())
        assert not pending, "a pending entry that the stream does not hold"
    return found


def tenants_of_different_buckets(count: int) -> list[str]:
    """Names of tenants, each in a bucket of its own."""
    found: dict[int, str] = {}
    i = 0
    while len(found) < min(count, BUCKETS):
        found.setdefault(keys.bucket_of(f"tenant-{i}"), f"tenant-{i}")
        i += 1
    return list(found.values())
