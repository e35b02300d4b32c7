"""orphan: a worker whose death is certain loses its jobs at once, and nothing else of what a lease does changes."""

from __future__ import annotations

from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import ForeignDataError
from shared.jobs import Publication, PulledJob
from shared.keys import GROUP, JobId
from shared.protocol import WorkerInfo
from shared.upkeep import Upkeep
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, last, owned, tokens

pytestmark = pytest.mark.topologies


@pytest.fixture
def store(commands: AsyncClient) -> Upkeep:
    return Upkeep(commands)


async def start(store: Upkeep, owner: str = "dead", **fields: Any) -> PulledJob:
    job = envelope(**fields)
    await store.submit(job)
    await store.heartbeat(POOL, WorkerInfo(owner=owner), 60_000)
    return (await store.pull(POOL, JobId.parse(job.id).lane, owner, budget(), KEEP)).jobs[0]


async def test_its_jobs_go_on_at_once_behind_what_was_published(store: Upkeep, client: Any) -> None:
    job, other = await start(store), await start(store, owner="lives")
    await store.publish([tokens(job, "dead", 1, 3)])
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.wake(POOL))
    found = await store.orphan(POOL, "dead", 16)
    assert (found.queued, found.ended) == (1, {})
    await check_lane(client, [job.envelope.id, other.envelope.id])
    # KEEP: the next worker has taken nothing from anybody, as just after its start.
    heir = (await store.pull(POOL, 0, "heir", budget(), KEEP)).jobs[0]
    assert (heir.envelope.id, heir.epoch, heir.last_seq, heir.attempts) == (job.envelope.id, 3, 3, 2)
    assert await store.publish([tokens(heir, "heir", 4), tokens(other, "lives", 1)]) == [Publication.FINE] * 2
    await check_lane(client, [job.envelope.id, other.envelope.id])
    messages = [await pubsub.get_message(timeout=5.0) for _ in range(2)]
    await pubsub.aclose()
    assert messages[1] is not None and messages[1]["data"] == b"0"


async def test_one_that_lives_all_the_same_is_fenced(store: Upkeep, client: Any) -> None:
    job = await start(store)
    await store.orphan(POOL, "dead", 16)
    for _ in range(2):  # before and after somebody else has the job
        assert await store.publish([tokens(job, "dead", 1)]) == [Publication.FENCED]
        assert await store.publish([last(job, "dead", 1)]) == [Publication.FENCED]
        assert await store.renew("dead", [owned(job)]) == [Publication.FENCED]
        assert not await store.release("dead", owned(job))
        await store.pull(POOL, 0, "heir", budget(), KEEP)
    assert (await store.get(job.envelope.id)).last_seq == 0
    await check_lane(client, [job.envelope.id])


async def test_nothing_of_it_is_left(store: Upkeep, client: Any) -> None:
    jobs = [await start(store, lane=lane) for lane in range(3)]
    assert await store.holders(POOL, 16) == {"dead": 3}
    await store.orphan(POOL, "dead", 16)
    assert await store.heartbeats(POOL) == {} and await store.live_workers(POOL, 60_000) == []
    for lane, job in enumerate(jobs):
        name = keys.queue(POOL, lane, "normal", keys.bucket_of("default"))
        assert await client.xinfo_consumers(name, GROUP) == []
        assert not await client.exists(keys.last_pull(POOL, lane, "dead"))
        await check_lane(client, [job.envelope.id], lane)


async def test_again_and_for_a_worker_that_nobody_knows_it_does_nothing(store: Upkeep, client: Any) -> None:
    job = await start(store)
    assert (await store.orphan(POOL, "dead", 16)).queued == 1
    assert (await store.orphan(POOL, "dead", 16)).queued == 0
    assert (await store.orphan(POOL, "nobody", 16)).queued == 0
    heir = (await store.pull(POOL, 0, "heir", budget(), KEEP)).jobs[0]
    assert (await store.orphan(POOL, "dead", 16)).queued == 0
    assert await store.publish([last(heir, "heir", 1)]) == [Publication.FINE]
    await check_lane(client, [job.envelope.id])


async def test_more_jobs_than_one_call_takes(store: Upkeep, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.upkeep._PAGE", 4)
    jobs = [envelope(tenant=f"t{i % 3}") for i in range(21)]
    for job in jobs:
        await store.submit(job)
    assert len((await store.pull(POOL, 0, "dead", budget(), KEEP)).jobs) == 21
    assert (await store.orphan(POOL, "dead", 1)).queued == 21
    await check_lane(client, [job.id for job in jobs])
    assert len((await store.pull(POOL, 0, "heir", budget(), KEEP)).jobs) == 21


async def test_jobs_that_are_over_end_there(store: Upkeep, client: Any) -> None:
    cancelled, late, live = await start(store), await start(store), await start(store)
    await store.cancel(cancelled.envelope.id)
    await client.hset(keys.job(JobId.parse(late.envelope.id)), "deadline_ms", 1)
    found = await store.orphan(POOL, "dead", 16)
    assert found.ended == {cancelled.envelope.id: "cancelled", late.envelope.id: "expired"} and found.queued == 1
    await check_lane(client, [job.envelope.id for job in (cancelled, late, live)])


async def test_deaths_count_as_where_leases_run_out(store: Upkeep, client: Any) -> None:
    job = await start(store, owner="w0")
    seen = []
    for i in range(4):
        await store.orphan(POOL, f"w{i}", 16)
        again = (await store.pull(POOL, 0, f"w{i + 1}", budget(idle=True), KEEP)).jobs[0]
        seen.append((again.suspect, again.alone, again.attempts))
    assert seen == [(False, False, 2), (True, False, 3), (True, True, 4), (True, True, 5)]
    assert (await store.orphan(POOL, "w4", 16)).ended == {job.envelope.id: "failed"}
    letter = (await store.dead_letters(POOL, 0))[0]
    assert letter.error is not None and (letter.job_id, letter.error.code) == (job.envelope.id, "job_failed")
    await check_lane(client, [job.envelope.id])


async def test_without_a_charge_nobody_is_condemned(store: Upkeep) -> None:
    await start(store, owner="w0")
    for i in range(8):
        await store.orphan(POOL, f"w{i}", 16, charge=False)
        job = (await store.pull(POOL, 0, f"w{i + 1}", budget(idle=True), KEEP)).jobs[0]
        assert not job.suspect and not job.alone


async def test_a_job_that_had_been_given_back_before(store: Upkeep, client: Any) -> None:
    job = await start(store, owner="first")
    await store.release("first", owned(job))
    assert (await store.pull(POOL, 0, "dead", budget(), KEEP)).jobs[0].epoch == 2
    assert (await store.orphan(POOL, "dead", 16)).queued == 1
    await check_lane(client, [job.envelope.id])
    assert (await store.pull(POOL, 0, "heir", budget(), NOW)).reclaimed == 0


async def test_a_lane_that_is_broken_keeps_no_other_from_going_on(store: Upkeep, client: Any) -> None:
    await start(store, lane=0)
    good = await start(store, lane=1)
    await client.set(keys.stats(POOL, 0), "junk")
    with pytest.raises(ForeignDataError):
        await store.orphan(POOL, "dead", 2)
    assert len((await store.pull(POOL, 1, "heir", budget(), KEEP)).jobs) == 1
    await check_lane(client, [good.envelope.id], 1)
    await client.delete(keys.stats(POOL, 0))
