"""A drain that finds jobs in every state, and clients who change their minds meanwhile."""

from __future__ import annotations

import asyncio
import signal

import pytest

from shared import keys
from tests.support.worker_harness import LANES, POOL, Harness, expected, harness, job


async def left_behind(h: Harness) -> list[str]:
    """Consumers, and streams on which anything is pending."""
    found = []
    for lane in range(LANES):
        for stream in keys.lane_streams(POOL, lane):
            if await h.client.exists(stream):
                found += [f"{stream} {consumer}" for consumer in await h.client.xinfo_consumers(stream, keys.GROUP)]
                if (await h.client.xpending(stream, keys.GROUP))["pending"]:
                    found.append(f"{stream} pending")
    return found


@pytest.mark.parametrize("grace", ["none", "long, and a second signal"])
async def test_running_just_pulled_and_queued(redis_url: str, grace: str) -> None:
    async with harness(redis_url) as h:
        # Steps so long that what comes after the first job is pulled, and not in the engine yet, when the signal comes.
        first = await h.worker(
            max_num_seqs=3, lease_s=60, sim_step_ms=1000, step_timeout_s=60, grace_s=0 if grace == "none" else 600
        )
        running, pulled, unwanted = job(1, max_tokens=60), job(2, lane=1, n=1, max_tokens=60), job(3, lane=2)
        followers = {envelope.id: await h.follow(envelope.id) for envelope in (running, pulled, unwanted)}
        await h.store.submit(running)
        await followers[running.id].tokens(2)
        for envelope in (pulled, unwanted):
            await h.store.submit(envelope)
            await first.event("pulled", job_id=envelope.id)
        waiting = [job(n, lane=n % LANES, max_tokens=60) for n in range(4, 8)]
        for envelope in waiting:
            followers[envelope.id] = await h.submit(envelope)
        first.signal(signal.SIGTERM)
        await first.event("worker drains")
        assert await h.store.cancel(unwanted.id) in ("running", "cancelled")
        if grace != "none":
            frames = await followers[unwanted.id].end()
            assert frames[-1].status == "cancelled", "a cancel is heard during a drain"
            assert first.alive
            first.signal(signal.SIGTERM)
        assert await first.wait() == 0

        assert (await h.store.status(unwanted.id))[0] == "cancelled", "and never undone by it"
        for envelope in (running, pulled, *waiting):
            view = await h.store.get(envelope.id)
            assert (view.status, view.attempts) == ("queued", 0), "no try was charged"
        assert {(await h.store.get(envelope.id)).epoch for envelope in waiting} == {0}, "nothing more was pulled"
        assert await left_behind(h) == []
        assert await h.store.live_workers(POOL, 60_000) == []

        await h.worker(lease_s=60, sim_step_ms=1)
        for envelope in (running, pulled, *waiting):
            frames = await followers[envelope.id].end()
            assert [frame.seq for frame in frames] == list(range(1, len(frames) + 1))
            assert (await h.result(envelope.id)).choices == expected(envelope)
        assert (await h.store.status(unwanted.id))[0] == "cancelled"


async def test_the_last_of_four_is_busy_while_the_queue_is_empty(valkey_url: str) -> None:
    """What is running counts in a pool's load, so that whoever scales by it does not take the busy one for idle."""
    async with harness(valkey_url) as h:
        workers = await asyncio.gather(*(h.worker(lease_s=60) for _ in range(4)))
        envelope = job(1, max_tokens=400)
        follower = await h.submit(envelope)
        await follower.tokens(5)
        load = await h.store.pool_load(POOL, LANES)
        assert (load.queued_jobs, load.running_jobs, load.running_tokens) == (0, 1, envelope.cost_tokens)
        busy = await h.holder(envelope.id)
        infos = {info.owner: info.running for info in await h.store.live_workers(POOL, 60_000)}
        assert len(infos) == 4
        for worker in workers:
            if worker is not busy:
                worker.signal(signal.SIGTERM)
        for worker in workers:
            if worker is not busy:
                assert await worker.wait() == 0
        assert {frame.epoch for frame in await follower.end()} == {1}, "it stayed where it was"
        assert (await h.result(envelope.id)).choices == expected(envelope)


async def test_a_worker_killed_before_its_first_token_is_not_noticed_by_the_client(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        slow = await h.worker(sim_step_ms=5000)
        envelope = job(1, max_tokens=30)
        follower = await h.submit(envelope)
        await slow.event("pulled", job_id=envelope.id)
        slow.signal(signal.SIGKILL)
        await h.worker()
        frames = await follower.end()
        assert [frame.seq for frame in frames] == list(range(1, len(frames) + 1))
        assert [frame.kind for frame in frames].count("started") == 1
        assert frames[-1].status == "completed"
        assert (await h.result(envelope.id)).choices == expected(envelope)


async def test_a_worker_that_comes_back_is_another_owner(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        first = await h.worker()
        first.signal(signal.SIGKILL)
        await first.wait()
        second = await h.worker()
        assert first.owner != second.owner


async def test_a_cancel_that_gets_lost_does_not_keep_a_drained_worker_alive(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(fault="lost cancel")
        worker.signal(signal.SIGTERM)
        assert await worker.wait() == 0
        assert await h.store.live_workers(POOL, 60_000) == []
