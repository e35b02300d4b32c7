"""Keys that are gone: emptied, deleted, evicted. No call minds, whatever it was, and what is still there goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.connect import connect_sync
from shared.errors import ForeignDataError
from shared.jobs import Lease, PulledJob
from shared.jobstore import SyncJobStore
from shared.keys import GROUP, JobId
from shared.protocol import FINAL_STATUSES, WorkerInfo
from shared.upkeep import Upkeep
from tests.integration.shared.test_scripts_registry import BUNDLE, card
from tests.support.at_rest import assert_at_rest
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, last, owned, tokens

Loss = Callable[[Any, list[str]], Awaitable[None]]


@pytest.fixture
def store(commands: AsyncClient) -> Upkeep:
    return Upkeep(commands)


@pytest.fixture
async def sync_store(redis_url: str) -> AsyncIterator[SyncJobStore]:
    client = connect_sync(redis_url)
    yield SyncJobStore(client)
    client.close()


def _streams() -> list[str]:
    return keys.lane_streams(POOL, 0)


async def nothing(client: Any, jobs: list[str]) -> None:
    pass


async def everything(client: Any, jobs: list[str]) -> None:
    await client.flushall()


async def streams(client: Any, jobs: list[str]) -> None:
    await client.delete(*_streams())


async def groups(client: Any, jobs: list[str]) -> None:
    for stream in _streams():
        if await client.exists(stream):
            await client.xgroup_destroy(stream, GROUP)


async def consumers(client: Any, jobs: list[str]) -> None:
    for stream in _streams():
        if await client.exists(stream):
            for consumer in await client.xinfo_consumers(stream, GROUP):
                await client.xgroup_delconsumer(stream, GROUP, consumer["name"])


async def counters(client: Any, jobs: list[str]) -> None:
    await client.delete(keys.stats(POOL, 0))


async def hashes(client: Any, jobs: list[str]) -> None:
    await client.delete(*(keys.job(JobId.parse(job)) for job in jobs))


async def logs(client: Any, jobs: list[str]) -> None:
    await client.delete(*(keys.events(JobId.parse(job)) for job in jobs))


async def registry(client: Any, jobs: list[str]) -> None:
    for key in (keys.workers(POOL), keys.worker(POOL, "w"), keys.card(POOL), keys.tokenizer(POOL), keys.pools()):
        await client.delete(key)


async def last_pulls(client: Any, jobs: list[str]) -> None:
    await client.delete(keys.last_pull(POOL, 0, "w"), keys.last_pull(POOL, 0, "v"))


LOSSES: list[Loss] = [
    nothing, everything, streams, groups, consumers, counters, hashes, logs, registry, last_pulls,
]  # fmt: skip


def calls(store: Upkeep, threads: SyncJobStore, held: list[PulledJob], queued: str) -> Iterator[Callable[[], Any]]:
    """Every call that there is."""
    first, second, third, fourth = held
    error = ForeignDataError("x")
    yield lambda: store.pool_load(POOL, 2)
    yield lambda: store.lane_loads(POOL, [0, 1])
    yield lambda: store.renew("w", [owned(job) for job in held])
    yield lambda: store.publish([tokens(first, "w", 2), tokens(second, "w", 2)])
    yield lambda: store.pull(POOL, 0, "v", budget(), Lease(lease_ms=60_000))
    yield lambda: store.publish([last(first, "w", 3)])
    yield lambda: store.release("w", owned(second))
    yield lambda: asyncio.to_thread(threads.bury, "w", owned(third), error)
    yield lambda: store.cancel(fourth.envelope.id)
    yield lambda: store.cancel(queued)
    yield lambda: store.forget(POOL, "w", 2)
    yield lambda: store.heartbeat(POOL, WorkerInfo(owner="w"), 60_000)
    yield lambda: store.live_workers(POOL, 60_000)
    yield lambda: store.put_card(card(), BUNDLE)
    yield lambda: store.dead_letters(POOL, 0)
    yield lambda: store.readers(queued)
    yield lambda: store.restore(queued)
    yield lambda: store.sweep_lane(POOL, 0, 0.0)
    yield lambda: store.pull(POOL, 0, "w", budget(), NOW)
    yield lambda: store.leave(POOL, "w")


@pytest.mark.parametrize("turn", [0, 5, 10])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
async def test_no_call_minds(
    store: Upkeep, sync_store: SyncJobStore, client: Any, redis_url: str, loss: Loss, turn: int
) -> None:
    """Lost in the beginning, in the middle or before the end of a row of all calls."""
    await store.put_card(card(), BUNDLE)
    adapters = [None, "a" * 32, "b" * 32]
    jobs = [
        envelope(tenant=f"tenant {n}", job_class="batch" if n % 2 else "normal", adapter_identity=adapters[n % 3])
        for n in range(6)
    ]
    for job in jobs[:4]:
        await store.submit(job)
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs
    await store.publish([tokens(job, "w", 1) for job in held])
    for job in jobs[4:]:
        await store.submit(job)
    every = list(calls(store, sync_store, held, jobs[4].id))
    for call in every[:turn]:
        await call()
    await loss(client, [job.id for job in jobs])
    for call in every[turn:]:
        await call()
    # A sweep looks for jobs that no stream holds, and mends the counters.
    for job in jobs:
        await store.restore(job.id)
    await store.sweep_lane(POOL, 0, 0.0)
    there = [job.id for job in jobs if await client.exists(keys.job(JobId.parse(job.id)))]
    if loss is not logs:  # whose beginning is lost
        await check_lane(client, there)
    await store.submit(fresh := envelope())
    served = {job.envelope.id for job in (await store.pull(POOL, 0, "u", budget(), NOW)).jobs}
    assert fresh.id in served
    assert len(there) == (0 if loss in (everything, hashes) else 6)
    await assert_at_rest(redis_url, POOL, 2)
    statuses = [(await store.status(job))[0] for job in there]
    assert set(statuses) <= FINAL_STATUSES


async def test_a_dead_workers_job_is_taken_back_though_its_group_was_lost(store: Upkeep, client: Any) -> None:
    """Nothing else waits in the lane that would have the group made again."""
    await store.submit(job := envelope())
    await store.pull(POOL, 0, "dead", budget(), KEEP)
    await groups(client, [])
    assert (await store.pull(POOL, 0, "heir", budget(), NOW)).jobs == [], "it counts as idle from here on"
    (taken,) = (await store.pull(POOL, 0, "heir", budget(), NOW)).jobs
    assert (taken.envelope.id, taken.epoch) == (job.id, 2)
    await check_lane(client, [job.id])


@pytest.mark.parametrize("call", ["cancel", "release", "publish"])
async def test_counters_that_were_lost_do_not_come_back_for_ever(store: Upkeep, client: Any, call: str) -> None:
    await store.submit(job := envelope())
    (held,) = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs
    await counters(client, [])
    if call == "release":
        await store.release("w", owned(held))
    elif call == "publish":
        await store.publish([last(held, "w", 1)])
    else:
        await store.release("w", owned(held))
        await counters(client, [])
        assert await store.cancel(job.id) == "cancelled"
    assert await client.exists(keys.stats(POOL, 0))
    assert await client.pttl(keys.stats(POOL, 0)) > 0


async def test_a_log_that_was_lost_does_not_come_back_for_ever(store: Upkeep, client: Any) -> None:
    await store.submit(envelope())
    (held,) = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs
    await store.publish([tokens(held, "w", 1, 2)])
    await logs(client, [held.envelope.id])
    await store.publish([tokens(held, "w", 3)])
    name = JobId.parse(held.envelope.id)
    assert await client.pexpiretime(keys.events(name)) == await client.pexpiretime(keys.job(name)) > 0
