"""Ten thousand jobs, ended in every way: the streams hold nothing of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shared import keys
from shared.connect import connect
from shared.jobs import LaneLoad
from shared.jobstore import JobStore
from shared.keys import CLASSES, GROUP
from shared.protocol import Envelope, JobStatus
from tests.support.jobs import KEEP, NOW, POOL, budget, envelope, last
from tests.support.redis_topology import raw_client

JOBS = 10_000
#: How a job ends, by its number.
ENDINGS: tuple[JobStatus, ...] = ("completed", "failed", "cancelled", "completed")


async def each(items: list[Any], call: Callable[[Any], Awaitable[object]]) -> None:
    """Call for all, some at a time."""
    for first in range(0, len(items), 50):
        await asyncio.gather(*(call(item) for item in items[first : first + 50]))


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
                await store.publish([last(job, owner, 1, ENDINGS[number[job.envelope.id] % 4]) for job in pulled])
        assert len(taken) == JOBS - JOBS // 10
    assert await store.lane_load(POOL, 0) == LaneLoad(
        ended_jobs=JOBS, ended_tokens=sum(job.cost_tokens for job in jobs)
    )
    for stream in keys.lane_streams(POOL, 0):
        if await client.exists(stream):
            assert await client.xlen(stream) == 0, stream
            assert (await client.xpending(stream, GROUP))["pending"] == 0, stream
    for one in (client, commands):
        await one.aclose()
