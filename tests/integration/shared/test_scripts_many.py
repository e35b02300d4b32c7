"""Ten thousand jobs, ended in every way: the streams hold nothing of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shared import keys, scripts
from shared.connect import connect
from shared.errors import ProtocolError
from shared.jobs import LaneLoad, PulledJob
from shared.jobstore import JobStore
from shared.keys import CLASSES, GROUP
from shared.protocol import Envelope, JobStatus
from tests.support.jobs import KEEP, NOW, POOL, budget, envelope, last, owned
from tests.support.redis_topology import raw_client

JOBS = 10_000
#: How a job ends on its worker, by its number; None: as a dead letter.
ENDINGS: tuple[JobStatus | None, ...] = ("completed", "failed", "cancelled", "expired", None)


async def each(items: list[Any], call: Callable[[Any], Awaitable[object]]) -> None:
    """Call for all, some at a time."""
    for first in range(0, len(items), 50):
        await asyncio.gather(*(call(item) for item in items[first : first + 50]))


async def end(store: JobStore, owner: str, jobs: list[tuple[PulledJob, JobStatus | None]]) -> None:
    """End jobs as a worker does; one in eight goes back first, and is ended by whoever takes it next."""
    given_back = [job for job, _ in jobs[::8]]
    assert all([await store.release(owner, owned(job)) for job in given_back])
    again = {job.envelope.id: job for job in (await store.pull(POOL, 0, owner, budget(500), KEEP)).jobs}
    assert again.keys() >= {job.envelope.id for job in given_back}
    jobs = [(again.get(job.envelope.id, job), status) for job, status in jobs]
    await store.publish([last(job, owner, 1, status) for job, status in jobs if status is not None])
    for job in [job for job, status in jobs if status is None]:
        await store._run(scripts.bury(owner, owned(job), ProtocolError("broken")))


async def test_streams_are_empty_afterwards(valkey_url: str) -> None:
    client, commands = await raw_client(valkey_url), connect(valkey_url)
    store = JobStore(commands)
    jobs = [envelope(job_class=CLASSES[i % 3], tenant=f"tenant {i % 20}") for i in range(JOBS)]
    number = {job.id: i for i, job in enumerate(jobs)}

    async def submit(job: Envelope) -> None:
        await store.submit(job)

    await each(jobs, submit)
    assert (await store.lane_load(POOL, 0)).queued_jobs == JOBS
    # Every tenth is cancelled while it waits, the others run: on a worker that dies, then on one that ends them.
    await each([job.id for job in jobs[::10]], store.cancel)
    for lease, owner in ((KEEP, "dies"), (NOW, "lives")):
        taken: list[Any] = []
        while pulled := (await store.pull(POOL, 0, owner, budget(500, suspects=500), lease)).jobs:
            taken += pulled
            if lease is NOW:
                await end(store, owner, [(job, ENDINGS[number[job.envelope.id] % len(ENDINGS)]) for job in pulled])
        assert len(taken) == JOBS - JOBS // 10
    assert await store.lane_load(POOL, 0) == LaneLoad(
        ended_jobs=JOBS, ended_tokens=sum(job.cost_tokens for job in jobs)
    )
    assert await client.xlen(keys.dead(POOL, 0)) >= 1800, "dead letters are kept, apart from the queue"
    for stream in keys.lane_streams(POOL, 0):
        if await client.exists(stream):
            assert await client.xlen(stream) == 0, stream
            assert (await client.xpending(stream, GROUP))["pending"] == 0, stream
    for one in (client, commands):
        await one.aclose()
