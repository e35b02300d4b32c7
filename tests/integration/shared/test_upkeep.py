"""Sweeps, dead letters and paused pools on a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import ConflictError, JobNotFoundError
from shared.jobs import DeadLetter, Lease, Lifetime
from shared.keys import GROUP, JobId
from shared.protocol import Frame, Result, WorkerInfo, decode
from shared.upkeep import Upkeep
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, last, owned, tokens

SHORT = Lifetime(deadline_s=0.05, max_run_s=5.0, retention_s=5.0)


@pytest.fixture
def upkeep(commands: AsyncClient) -> Upkeep:
    return Upkeep(commands)


async def bury(upkeep: Upkeep) -> str:
    """A job that killed five workers, twice alone."""
    job = envelope(prompt=7)
    await upkeep.submit(job)
    for number in range(6):
        await upkeep.pull(POOL, 0, f"w{number}", budget(idle=True), Lease(lease_ms=0, max_attempts=2))
    assert (await upkeep.status(job.id))[0] == "failed"
    return job.id


async def test_late_jobs_end_though_no_worker_lives(upkeep: Upkeep, client: Any) -> None:
    queued, running, fresh = envelope(), envelope(job_class="batch"), envelope()
    await upkeep.submit(running, lifetime=SHORT)
    job = (await upkeep.pull(POOL, 0, "dead", budget(), KEEP)).jobs[0]
    await upkeep.publish([tokens(job, "dead", 1, 2)])
    await upkeep.submit(queued, lifetime=SHORT)
    await upkeep.submit(fresh)
    await asyncio.sleep(0.1)
    # A running job has some time more: its worker ends it, if it lives.
    assert (await upkeep.sweep_lane(POOL, 0, 30.0)).ended == {queued.id: "expired"}
    assert (await upkeep.sweep_lane(POOL, 0, 0.0)).ended == {running.id: "expired"}
    assert (await upkeep.sweep_lane(POOL, 0, 0.0)).ended == {}
    frame = decode((await upkeep.read_log(running.id))[-1], Frame)
    assert frame.error is not None
    assert (frame.seq, frame.kind, frame.error.code) == (3, "error", "deadline_exceeded")
    result = decode((await upkeep.get(running.id)).result or b"", Result)
    assert result.choices[0].token_ids == [1, 2]
    await check_lane(client, [queued.id, running.id, fresh.id])


async def test_a_handed_back_job_expires_too(upkeep: Upkeep, client: Any) -> None:
    job = envelope()
    await upkeep.submit(job, lifetime=SHORT)
    pulled = (await upkeep.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await upkeep.release("w", owned(pulled))
    await asyncio.sleep(0.1)
    assert (await upkeep.sweep_lane(POOL, 0, 30.0)).ended == {job.id: "expired"}
    await check_lane(client, [job.id])


async def test_a_sweep_walks_long_queues_page_by_page(upkeep: Upkeep, client: Any) -> None:
    jobs = [envelope() for _ in range(450)]
    for i, job in enumerate(jobs):
        await upkeep.submit(job, lifetime=SHORT if i % 2 else None)
    await asyncio.sleep(0.1)
    ended = (await upkeep.sweep_lane(POOL, 0, 0.0)).ended
    assert ended == {job.id: "expired" for job in jobs[1::2]}
    await check_lane(client, [job.id for job in jobs])


@pytest.mark.parametrize("running", [False, True])
async def test_an_entry_without_a_job_goes(upkeep: Upkeep, client: Any, running: bool) -> None:
    job, other = envelope(), envelope()
    await upkeep.submit(job)
    if running:
        await upkeep.pull(POOL, 0, "w", budget(), KEEP)
    await upkeep.submit(other)
    await client.delete(keys.job(JobId.parse(job.id)))
    assert (await upkeep.sweep_lane(POOL, 0, 0.0)).ended == {job.id: "lost"}
    await check_lane(client, [other.id])


async def test_a_deleted_stream_is_made_again(upkeep: Upkeep, client: Any) -> None:
    queued, running, done = envelope(), envelope(), envelope()
    for job in (running, done, queued):
        await upkeep.submit(job)
        if job is not queued:
            pulled = (await upkeep.pull(POOL, 0, "w", budget(1), KEEP)).jobs[0]
            await upkeep.publish([tokens(pulled, "w", 1) if job is running else last(pulled, "w", 1)])
    await client.delete(keys.queue(POOL, 0, "normal", keys.bucket_of("default")))
    found = [job_id async for job_id in upkeep.job_ids(POOL)]
    assert sorted(found) == sorted([queued.id, running.id, done.id])
    assert sorted([job_id for job_id in found if await upkeep.restore(job_id)]) == sorted([queued.id, running.id])
    assert not any([await upkeep.restore(job_id) for job_id in found])
    await check_lane(client, found)
    pulled_again = await upkeep.pull(POOL, 0, "x", budget(), KEEP)
    assert {job.envelope.id: job.last_seq for job in pulled_again.jobs} == {queued.id: 0, running.id: 1}
    assert min(job.epoch for job in pulled_again.jobs) > 1, "whoever had it is fenced"
    await check_lane(client, found)


async def test_lost_counters_are_counted_anew(upkeep: Upkeep, client: Any) -> None:
    jobs = [envelope(tenant=f"t{i % 5}", job_class="batch" if i % 2 else "high") for i in range(12)]
    for job in jobs:
        await upkeep.submit(job)
    await upkeep.pull(POOL, 0, "w", budget(4), KEEP)
    assert not (await upkeep.sweep_lane(POOL, 0, 30.0)).recounted
    await client.delete(keys.stats(POOL, 0))
    assert (await upkeep.sweep_lane(POOL, 0, 30.0)).recounted
    await check_lane(client, [job.id for job in jobs])
    assert await client.pttl(keys.stats(POOL, 0)) > 0


async def test_consumers_of_dead_workers_go_once_nothing_is_pending_on_them(upkeep: Upkeep, client: Any) -> None:
    stream = keys.queue(POOL, 0, "normal", keys.bucket_of("default"))
    jobs = [envelope() for _ in range(3)]
    for job, owner in zip(jobs, ("dead", "dead with a job", "alive"), strict=True):
        await upkeep.submit(job)
        pulled = (await upkeep.pull(POOL, 0, owner, budget(), KEEP)).jobs[0]
        if owner != "dead with a job":
            await upkeep.publish([last(pulled, owner, 1)])
    await upkeep.heartbeat(POOL, WorkerInfo(owner="alive"), 60_000)
    assert (await upkeep.sweep_lane(POOL, 0, 30.0)).forgotten == 1
    assert {c["name"] for c in await client.xinfo_consumers(stream, GROUP)} == {b"dead with a job", b"alive"}
    await check_lane(client, [job.id for job in jobs])
    heir = (await upkeep.pull(POOL, 0, "alive", budget(), NOW)).jobs[0]
    assert heir.envelope.id == jobs[1].id
    assert (await upkeep.sweep_lane(POOL, 0, 30.0)).forgotten == 1
    assert (await upkeep.sweep_lane(POOL, 0, 30.0)).forgotten == 0
    await check_lane(client, [job.id for job in jobs])


async def test_a_lost_group_does_not_stop_the_sweep(upkeep: Upkeep, client: Any) -> None:
    job = envelope()
    await upkeep.submit(job, lifetime=SHORT)
    await client.xgroup_destroy(keys.queue(POOL, 0, "normal", keys.bucket_of("default")), GROUP)
    await asyncio.sleep(0.1)
    assert (await upkeep.sweep_lane(POOL, 0, 0.0)).ended == {job.id: "expired"}


async def test_only_one_sweeps_at_a_time(upkeep: Upkeep) -> None:
    assert await upkeep.lock_sweep(POOL, "a", 0.2)
    assert not await upkeep.lock_sweep(POOL, "b", 0.2)
    await asyncio.sleep(0.3)
    assert await upkeep.lock_sweep(POOL, "b", 0.2)


async def test_a_dead_letter_is_retried_as_a_new_job(upkeep: Upkeep, client: Any) -> None:
    job_id = await bury(upkeep)
    letter = await upkeep.find_dead(job_id)
    assert (letter.reason, letter.attempts >= 2) == ("workers died", True)
    again = await upkeep.retry_dead(job_id)
    assert again != job_id
    with pytest.raises(JobNotFoundError):
        await upkeep.find_dead(job_id)
    view = await upkeep.get(again)
    assert (view.status, view.envelope.prompt_token_ids) == ("queued", list(range(1, 8)))
    await check_lane(client, [job_id, again])


async def test_a_retry_that_was_cut_off_makes_no_second_job(
    upkeep: Upkeep, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await bury(upkeep)

    async def die(self: Upkeep, letter: DeadLetter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Upkeep, "purge_dead", die)
        with pytest.raises(KeyboardInterrupt):
            await upkeep.retry_dead(job_id)
    again = await upkeep.retry_dead(job_id)
    assert (await upkeep.lane_load(POOL, 0)).queued_jobs == 1
    await check_lane(client, [job_id, again])


async def test_a_dead_letter_outlives_its_job(upkeep: Upkeep, client: Any) -> None:
    job_id = await bury(upkeep)
    await client.delete(keys.job(JobId.parse(job_id)), keys.events(JobId.parse(job_id)))
    again = await upkeep.retry_dead(job_id)
    assert (await upkeep.status(again))[0] == "queued"


async def test_what_does_not_decode_cannot_be_retried_but_purged(upkeep: Upkeep, client: Any) -> None:
    job = envelope()
    await upkeep.submit(job)
    await client.hset(keys.job(JobId.parse(job.id)), "env", b"\xc1 no envelope")
    assert (await upkeep.pull(POOL, 0, "w", budget(), KEEP)).buried == [job.id]
    letter = await upkeep.find_dead(job.id)
    assert letter.envelope == b"\xc1 no envelope"
    with pytest.raises(ConflictError):
        await upkeep.retry_dead(job.id)
    await upkeep.purge_dead(letter)
    assert [each async for each in upkeep.all_dead(POOL, 0)] == []


async def test_pausing_is_told_and_kept(upkeep: Upkeep, client: Any) -> None:
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.control(POOL))
    await pubsub.get_message(timeout=5)
    assert not await upkeep.paused(POOL)
    await upkeep.pause(POOL)
    await upkeep.pause(POOL)
    assert await upkeep.paused(POOL)
    assert b"pause" in (await pubsub.get_message(timeout=5))["data"]
    await upkeep.unpause(POOL)
    assert not await upkeep.paused(POOL)
    await pubsub.aclose()


async def test_what_is_swept_twice_at_once_ends_once(upkeep: Upkeep, client: Any) -> None:
    jobs = [envelope() for _ in range(60)]
    for job in jobs:
        await upkeep.submit(job, lifetime=SHORT)
    await asyncio.sleep(0.1)
    swept = await asyncio.gather(
        *(upkeep.sweep_lane(POOL, 0, 0.0) for _ in range(4)), upkeep.pull(POOL, 0, "w", budget(), NOW)
    )
    ended = [job_id for each in swept for job_id in each.ended]
    assert sorted(ended) == sorted(job.id for job in jobs)
    await check_lane(client, [job.id for job in jobs])
