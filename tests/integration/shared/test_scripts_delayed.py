"""Jobs with a delay: accepted now, queued when their time comes, by whoever looks first; and jobs that are deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import JobNotFoundError, JobRunningError, OverloadedError, ProtocolError
from shared.jobs import LaneLimits, Lease, Lifetime, Publication
from shared.keys import JobId
from shared.protocol import Envelope
from shared.upkeep import Upkeep
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, last, owned, tokens

pytestmark = pytest.mark.topologies
HOUR = Lifetime(delay_s=3600.0, deadline_s=60.0, max_run_s=10.0, retention_s=5.0)


@pytest.fixture
def store(commands: AsyncClient) -> Upkeep:
    return Upkeep(commands)


async def delayed(store: Upkeep, **fields: Any) -> Envelope:
    job = envelope(**fields)
    await store.submit(job, lifetime=HOUR)
    return job


async def come(client: Any, *jobs: Envelope) -> None:
    """Their time comes; the first first."""
    for n, job in enumerate(jobs):
        await client.zadd(keys.delayed(POOL, 0), {job.id: 1 + n})
        await client.expire(keys.delayed(POOL, 0), 60)


async def test_nobody_gets_it_before_its_time(store: Upkeep, client: Any) -> None:
    job = await delayed(store)
    view = await store.get(job.id)
    assert (view.status, view.start_ms - view.submitted_ms) == ("delayed", 3_600_000)
    assert view.deadline_ms - view.start_ms == 60_000
    load = await store.lane_load(POOL, 0)
    assert (load.delayed_jobs, load.delayed_tokens, load.queued_jobs, load.running_jobs) == (1, 10, 0, 0)
    assert not (await store.pull(POOL, 0, "w", budget(), NOW)).jobs
    assert (await store.sweep_lane(POOL, 0, 0.0)).started == 0
    await check_lane(client, [job.id])
    for name in (keys.job(JobId.parse(job.id)), keys.delayed(POOL, 0), keys.stats(POOL, 0)):
        assert 3_600_000 < await client.pttl(name) <= 3_675_000


async def test_a_pull_queues_what_is_due_and_takes_it(store: Upkeep, client: Any) -> None:
    jobs = [await delayed(store, tenant=f"t{n}") for n in range(3)]
    await come(client, jobs[1], jobs[0])
    pulled = await store.pull(POOL, 0, "w", budget(1), KEEP)
    assert len(pulled.jobs) == 1
    statuses = [(await store.status(job.id))[0] for job in jobs]
    assert sorted(statuses) == ["delayed", "queued", "running"] and statuses[2] == "delayed"
    # It has waited since its time came, not since its submit, which an hour ago would put it in front of all others.
    assert pulled.jobs[0].queue_ms < 60_000
    await check_lane(client, [job.id for job in jobs])


async def test_a_sweep_queues_what_is_due_and_wakes_workers(store: Upkeep, client: Any) -> None:
    jobs = [await delayed(store) for _ in range(3)]
    await come(client, *jobs)
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.wake(POOL))
    await pubsub.get_message(timeout=5)
    assert (await store.sweep_lane(POOL, 0, 0.0)).started == 3
    assert (await pubsub.get_message(timeout=5))["data"] == b"0"
    await pubsub.aclose()
    assert [job.envelope.id for job in (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs] == [j.id for j in jobs]


async def test_many_lookers_queue_each_job_once(store: Upkeep, client: Any) -> None:
    jobs = [await delayed(store) for _ in range(30)]
    await come(client, *jobs)
    lookers = [store.pull(POOL, 0, f"w{n}", budget(), KEEP) for n in range(4)]
    swept, *pulled = await asyncio.gather(store.sweep_lane(POOL, 0, 0.0), *lookers)
    taken = [job.envelope.id for answer in pulled for job in answer.jobs]
    assert sorted(taken) == sorted(job.id for job in jobs)
    assert swept.started in (0, 30)
    await check_lane(client, taken)


async def test_a_delayed_job_is_cancelled_here_and_now(store: Upkeep, client: Any) -> None:
    job = await delayed(store)
    assert await store.cancel(job.id) == "cancelled"
    assert await store.cancel(job.id) == "cancelled"
    await come(client, job)  # a name that is left does no harm
    assert not (await store.pull(POOL, 0, "w", budget(), NOW)).jobs
    await check_lane(client, [job.id])
    assert (await store.get(job.id)).result is not None


async def test_limits_count_delayed_jobs(store: Upkeep, client: Any) -> None:
    limits = LaneLimits(2, 1000)
    await store.submit(envelope(), lifetime=HOUR, limits=limits)
    await store.submit(envelope(), limits=limits)
    for lifetime in (HOUR, None):
        with pytest.raises(OverloadedError):
            await store.submit(envelope(), lifetime=lifetime, limits=limits)


async def test_the_deadline_counts_from_the_start(store: Upkeep, client: Any) -> None:
    job = await delayed(store)
    await come(client, job)
    await client.hset(keys.job(JobId.parse(job.id)), "deadline_ms", 1)
    assert (await store.pull(POOL, 0, "w", budget(), KEEP)).ended == {job.id: "expired"}
    await check_lane(client, [job.id])


@pytest.mark.parametrize("loss", ["delayed", "stats", "both"])
async def test_what_was_lost_is_found_again(store: Upkeep, client: Any, loss: str) -> None:
    job = await delayed(store, adapter_identity="a" * 32)
    names = {"delayed": [keys.delayed(POOL, 0)], "stats": [keys.stats(POOL, 0)]}
    await client.delete(*names.get(loss, [*names["delayed"], *names["stats"]]))
    assert await store.restore(job.id) == (loss != "stats")
    assert not await store.restore(job.id)
    await store.sweep_lane(POOL, 0, 0.0)
    await check_lane(client, [job.id])
    await come(client, job)
    assert len((await store.pull(POOL, 0, "w", budget(), KEEP)).jobs) == 1


async def test_a_delayed_job_whose_hash_was_lost_is_counted_no_longer(store: Upkeep, client: Any) -> None:
    job = await delayed(store)
    await client.delete(keys.job(JobId.parse(job.id)))
    await come(client, job)
    assert not (await store.pull(POOL, 0, "w", budget(), NOW)).jobs
    await store.sweep_lane(POOL, 0, 0.0)
    assert (await store.lane_load(POOL, 0)).delayed_jobs == 0


async def test_something_else_in_place_of_the_delayed_stops_no_other(store: Upkeep, client: Any) -> None:
    await client.set(keys.delayed(POOL, 0), "x", ex=60)
    with pytest.raises(ProtocolError):
        await store.submit(envelope(), lifetime=HOUR)
    job = envelope()
    await store.submit(job)
    assert len((await store.pull(POOL, 0, "w", budget(), NOW)).jobs) == 1
    await store.sweep_lane(POOL, 0, 0.0)
    assert (await store.lane_load(POOL, 0)).running_jobs == 1


async def test_something_else_in_place_of_the_indexes_stops_no_job(store: Upkeep, client: Any) -> None:
    await client.set(keys.expiring(POOL, 0), "x", ex=60)
    await client.set(keys.tenant_jobs(POOL, 0, "default"), "x", ex=60)
    await store.submit(job := envelope())
    pulled = (await store.pull(POOL, 0, "w", budget(), NOW)).jobs[0]
    assert await store.publish([last(pulled, "w", 1)]) == [Publication.FINE]
    assert await store.delete(job.id) == "completed"


# Deleting


@pytest.mark.parametrize("state", ["delayed", "queued", "cancelled", "completed"])
async def test_of_a_deleted_job_nothing_is_left(store: Upkeep, client: Any, state: str) -> None:
    other = envelope()
    await store.submit(other)
    before = {key for key in await client.keys("*") if b"}:ev:" not in key}
    await store.pull(POOL, 0, "v", budget(), KEEP)
    job = envelope(tenant="default")
    await store.submit(job, lifetime=HOUR if state == "delayed" else None, attachment=b"mine")
    if state == "completed":
        pulled = (await store.pull(POOL, 0, "v", budget(), KEEP)).jobs[0]
        await store.publish([tokens(pulled, "v", 1)])
        await store.publish([last(pulled, "v", 2)])
    elif state == "cancelled":
        await store.cancel(job.id)
    assert await store.delete(job.id) == state
    with pytest.raises(JobNotFoundError):
        await store.delete(job.id)
    left = set(await client.keys("*")) - before - {keys.last_pull(POOL, 0, "v").encode()}
    left = {key for key in left if b"}:usage:" not in key}  # what was used is told for longer, without what was asked
    assert left <= {keys.queue(POOL, 0, "normal", keys.bucket_of("default")).encode()}
    assert not await client.zcard(keys.delayed(POOL, 0))
    assert await client.zrange(keys.tenant_jobs(POOL, 0, "default"), 0, -1) == [JobId.parse(other.id).unique.encode()]
    await check_lane(client, [other.id])


async def test_whoever_follows_a_deleted_job_sees_its_end(store: Upkeep, client: Any) -> None:
    await store.submit(job := envelope())
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.events(JobId.parse(job.id)))
    await pubsub.get_message(timeout=5)
    await store.delete(job.id)
    assert b"cancelled" in (await pubsub.get_message(timeout=5))["data"]
    await pubsub.aclose()


async def test_a_running_job_is_not_deleted(store: Upkeep, client: Any) -> None:
    await store.submit(job := envelope())
    pulled = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    with pytest.raises(JobRunningError):
        await store.delete(job.id)
    await check_lane(client, [job.id])
    assert await store.publish([last(pulled, "w", 1)]) == [Publication.FINE]
    await store.delete(job.id)


async def test_a_deleted_job_has_no_dead_letter(store: Upkeep, client: Any) -> None:
    await store.submit(job := envelope())
    for n in range(5):
        await store.pull(POOL, 0, f"w{n}", budget(idle=True), Lease(lease_ms=0, max_attempts=1))
    await store.pull(POOL, 0, "u", budget(idle=True), Lease(lease_ms=0, max_attempts=1))
    assert [letter.job_id for letter in await store.dead_letters(POOL, 0)] == [job.id]
    await store.delete(job.id)
    assert await store.dead_letters(POOL, 0) == []


async def test_a_deleted_job_can_be_released_and_published_by_nobody(store: Upkeep, client: Any) -> None:
    await store.submit(job := envelope())
    pulled = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await store.publish([last(pulled, "w", 1)])
    await store.delete(job.id)
    assert await store.publish([last(pulled, "w", 1)]) == [Publication.FENCED]
    assert not await store.release("w", owned(pulled))
