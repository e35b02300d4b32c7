"""What happens to jobs when workers die, pause, drain or hang, and when Redis goes away."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import httpx
import pytest
import redis.asyncio

from shared import keys
from shared.keys import JobId
from shared.protocol import Frame
from tests.support.faulty_worker import TRIGGER
from tests.support.redis_server import RedisServer
from tests.support.redis_topology import kill_clients
from tests.support.worker_harness import LANES, POOL, Harness, WorkerProcess, expected, harness, job
from worker.pulse import EXIT_REFUSED, EXIT_STALLED


async def _attempts(h: Harness, job_id: str) -> int:
    return (await h.store.get(job_id)).attempts


def _epochs(frames: list[Frame]) -> list[int]:
    return sorted({frame.epoch for frame in frames})


async def test_a_killed_workers_job_goes_on_elsewhere_from_its_log(redis_url: str) -> None:
    async with harness(redis_url) as h:
        await asyncio.gather(h.worker(), h.worker())
        jobs = [job(1, max_tokens=150), job(2, lane=1, n=2, logprobs=1, stop=["the"], max_tokens=150)]
        followers = [await h.submit(envelope) for envelope in jobs]
        await followers[0].tokens(20)
        (await h.holder(jobs[0].id)).signal(signal.SIGKILL)
        frames = await followers[0].end()
        await followers[1].end()
        assert _epochs(frames) == [1, 2]
        for envelope in jobs:
            result = await h.result(envelope.id)
            assert result.status == "completed" and result.choices == expected(envelope)
        assert await _attempts(h, jobs[0].id) == 2
        await h.assert_clean()


async def test_all_jobs_of_a_killed_worker_go_on_at_once(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        first = await h.worker()
        jobs = [job(n, lane=n % LANES, max_tokens=400) for n in range(12)]
        followers = [await h.submit(envelope) for envelope in jobs]
        for follower in followers:
            await follower.tokens(5)
        second = await h.worker()
        first.signal(signal.SIGKILL)
        for envelope in jobs:
            await second.event("taken up", job_id=envelope.id)
        assert not any(follower.frames[-1].last for follower in followers), "some had to wait for the end of others"
        for follower in followers:
            assert _epochs(await follower.end()) == [1, 2]
        await h.assert_clean()


async def test_a_job_is_taken_up_by_a_worker_that_comes_later(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        first = await h.worker()
        envelope = job(max_tokens=100)
        follower = await h.submit(envelope)
        await follower.tokens(10)
        first.signal(signal.SIGKILL)
        await first.wait()
        await h.worker()
        await follower.end()
        assert (await h.result(envelope.id)).choices == expected(envelope)


@pytest.mark.parametrize("step_ms", [20, 2500], ids=["many steps", "one step longer than two leases"])
async def test_a_job_longer_than_the_lease_stays_where_it_is(valkey_url: str, step_ms: int) -> None:
    async with harness(valkey_url) as h:
        workers = await asyncio.gather(h.worker(sim_step_ms=step_ms), h.worker(sim_step_ms=step_ms))
        envelope = job(max_tokens=3000 // step_ms + 1)
        assert _epochs(await (await h.submit(envelope)).end()) == [1]
        assert (await h.result(envelope.id)).choices == expected(envelope)
        assert await _attempts(h, envelope.id) == 1
        assert all(worker.alive for worker in workers)


async def test_sigterm_lets_jobs_end_within_the_grace_period(redis_url: str) -> None:
    async with harness(redis_url) as h:
        worker = await h.worker()
        envelope, late = job(1, max_tokens=50), job(2)
        follower = await h.submit(envelope)
        await follower.tokens(5)
        worker.signal(signal.SIGTERM)
        await worker.event("worker drains")
        await h.submit(late)
        assert _epochs(await follower.end()) == [1]
        assert await worker.wait() == 0
        assert (await h.result(envelope.id)).choices == expected(envelope)
        assert (await h.store.status(late.id))[0] == "queued", "a draining worker pulls nothing"
        assert await h.store.live_workers(POOL, 60_000) == []
        await h.store.cancel(late.id)
        await h.assert_clean()


@pytest.mark.parametrize("how", ["grace is over", "second signal"])
async def test_sigterm_hands_back_what_does_not_end(valkey_url: str, how: str) -> None:
    async with harness(valkey_url) as h:
        first = await h.worker(grace_s=0 if how == "grace is over" else 600, lease_s=60)
        jobs = [job(n, lane=n, max_tokens=400, n=1 + n) for n in range(3)]
        followers = [await h.submit(envelope) for envelope in jobs]
        for follower in followers:
            await follower.tokens(20)
        first.signal(signal.SIGTERM)
        if how == "second signal":
            await first.event("worker drains")
            first.signal(signal.SIGINT)
        assert await first.wait() == 0
        # The lease is a minute: what is taken up now was handed over.
        second = await h.worker(lease_s=60, sim_step_ms=1)
        for follower, envelope in zip(followers, jobs, strict=True):
            assert _epochs(await follower.end()) == [1, 2]
            assert (await h.result(envelope.id)).choices == expected(envelope)
            assert await _attempts(h, envelope.id) == 1, "a drain costs no attempt"
            await second.event("taken up", job_id=envelope.id)
        await h.assert_clean()


async def test_sigterm_while_waiting_for_redis_at_the_start() -> None:
    server = RedisServer("valkey")
    try:
        async with harness(server.url, clean=False) as h:
            worker = await h.worker(ready=False)
            await worker.event("heartbeat failed, trying again")
            worker.signal(signal.SIGTERM)
            assert await worker.wait() == 0
    finally:
        server.close()


async def test_a_worker_that_loads_is_alive_not_ready_and_stops_when_told(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(ready=False, fault="load")
        await worker.event("worker starts")
        await h.submit(job())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.health_port}") as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
        worker.signal(signal.SIGTERM)
        assert await worker.wait() == 0
        assert (await h.store.pool_load(POOL, 4)).queued_jobs == 1, "nothing is pulled before the engine is there"


async def test_a_model_that_cannot_be_had_ends_the_process_with_a_reason(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(ready=False, fault="no model")
        assert await worker.wait() == EXIT_REFUSED
        assert (await worker.event("no engine can be made of these settings"))["reason"] == "no such model"


async def test_a_paused_worker_is_fenced_and_publishes_nothing(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await asyncio.gather(h.worker(), h.worker())
        envelope = job(max_tokens=250)
        follower = await h.submit(envelope)
        await follower.tokens(10)
        zombie = await h.holder(envelope.id)
        zombie.signal(signal.SIGSTOP)
        await follower.until(lambda frames: frames[-1].epoch == 2)
        zombie.signal(signal.SIGCONT)
        await zombie.event("fenced", "lease lost", job_id=envelope.id)
        frames = await follower.end()
        assert _epochs(frames) == [1, 2]
        assert (await h.result(envelope.id)).choices == expected(envelope)
        # It goes on as a worker like any other.
        after = [job(n, lane=n % 4) for n in range(8)]
        for follower in [await h.submit(envelope) for envelope in after]:
            await follower.end()
        assert zombie.alive
        await h.assert_clean()


async def test_a_paused_worker_alone_goes_on_with_its_job(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(step_timeout_s=1)
        envelope = job(max_tokens=100)
        follower = await h.submit(envelope)
        await follower.tokens(10)
        worker.signal(signal.SIGSTOP)
        # Longer than lease and step time-out; nothing can be awaited of a process that is stopped.
        await asyncio.sleep(2.5)
        worker.signal(signal.SIGCONT)
        assert _epochs(await follower.end()) == [1]
        assert (await h.result(envelope.id)).choices == expected(envelope)


async def test_an_engine_that_hangs_ends_the_process_and_the_jobs_move(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        faulty = await h.worker(fault="hang", step_timeout_s=1)
        jobs = [job(1, max_tokens=60), job(2, max_tokens=60)]
        jobs[0].prompt_token_ids[0] = TRIGGER
        followers = [await h.submit(envelope) for envelope in jobs]
        assert await faulty.wait() == EXIT_STALLED
        await h.worker()
        for follower, envelope in zip(followers, jobs, strict=True):
            await follower.end()
            assert (await h.result(envelope.id)).choices == expected(envelope)
        await h.assert_clean()


async def test_lost_connections_lose_and_double_nothing(redis_url: str) -> None:
    async with harness(redis_url) as h:
        await h.worker()
        jobs = [job(n, lane=n % 4, max_tokens=150, n=1 + n % 2) for n in range(6)]
        followers = [await h.submit(envelope) for envelope in jobs]
        for count in (10, 30, 60, 90, 120):
            await followers[0].tokens(count)
            for kind in ("normal", "pubsub"):
                await kill_clients(h.client, kind)
        for follower, envelope in zip(followers, jobs, strict=True):
            await follower.end()
            result = await _patient(lambda job_id=envelope.id: h.result(job_id))
            assert result.status == "completed" and result.choices == expected(envelope)
        await h.assert_clean()


async def _patient(call):  # type: ignore[no-untyped-def]
    """The test's own connections were killed too: one more try."""
    with contextlib.suppress(redis.RedisError, OSError):
        return await call()
    return await call()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_redis_killed_and_restarted_with_its_data(kind: str) -> None:
    server = RedisServer(kind, appendonly=True, extra=["--appendfsync", "always"])
    server.start()
    try:
        async with harness(server.url) as h:
            await asyncio.gather(h.worker(), h.worker())
            jobs = [job(n, lane=n % 4, max_tokens=200) for n in range(6)]
            followers = [await h.submit(envelope) for envelope in jobs]
            for follower in followers:
                await follower.tokens(10)
            await asyncio.to_thread(server.kill)
            # Away for longer than the lease: afterwards every entry looks idle.
            await asyncio.sleep(1.5)
            await asyncio.to_thread(server.start)
            for follower, envelope in zip(followers, jobs, strict=True):
                assert _epochs(await follower.end()) == [1], "nobody may reclaim after an outage"
                assert (await h.result(envelope.id)).choices == expected(envelope)
                assert await _attempts(h, envelope.id) == 1
            await h.assert_clean()
    finally:
        server.close()


async def test_redis_comes_back_empty(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker()
        lost = job(1, max_tokens=3000)
        follower = await h.submit(lost)
        await follower.tokens(10)
        await h.client.flushall()
        await worker.event("fenced", "lease lost", job_id=lost.id)
        await worker.event("card written again")
        fresh = job(2)
        await (await h.submit(fresh)).end()
        assert (await h.result(fresh.id)).choices == expected(fresh)
        assert await h.client.exists(keys.events(JobId.parse(lost.id))) == 0, "nothing of the lost job is written"
        assert [info.owner for info in await h.store.live_workers(POOL, 60_000)] == [worker.owner]
        await h.assert_clean()


async def test_redis_loses_the_last_frames_and_the_job_goes_on_from_what_is_left(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker()
        envelope = job(max_tokens=150)
        follower = await h.submit(envelope)
        frames = await follower.tokens(30)
        # As after a restart from an append-only file that lacked the last second.
        log, seq = keys.events(JobId.parse(envelope.id)), frames[-1].seq
        async with h.client.pipeline(transaction=True) as pipe:
            pipe.execute_command("XREVRANGE", log, "+", f"{seq - 10}-0")
            pipe.hset(keys.job(JobId.parse(envelope.id)), "seq", seq - 10)
            entries = (await pipe.execute())[0]
            await h.client.xdel(log, *(entry for entry, _ in entries if int(entry.split(b"-")[0]) > seq - 10))
        await worker.event("taken up", job_id=envelope.id)
        assert worker.alive
        await h.store.cancel(envelope.id)


async def test_a_worker_of_another_kind_may_not_join(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker()
        stranger = await h.worker(ready=False, max_model_len=128)
        assert await stranger.wait() == EXIT_REFUSED
        line = await stranger.event("this worker does not fit into the pool")
        assert "128" in line["reason"]


async def test_what_it_takes_is_what_it_can_admit(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        small: list[WorkerProcess] = [await h.worker(max_num_seqs=2)]
        jobs = [job(n, lane=n % 4, max_tokens=60) for n in range(8)]
        followers = [await h.submit(envelope) for envelope in jobs]
        await followers[0].tokens(5)
        load = await h.store.pool_load(POOL, 4)
        assert load.running_jobs <= 2 and load.queued_jobs >= 4
        small.append(await h.worker(max_num_seqs=2))
        # On a busy machine the first worker may be done by now: more than it can hold, for the second one too.
        followers += [await h.submit(job(n, lane=n % 4, max_tokens=60)) for n in range(8, 16)]
        for follower in followers:
            await follower.end()
        assert all(any(line["event"] == "pulled" for line in worker.lines) for worker in small)
        await h.assert_clean()
