"""When Redis, the network or the caller fails: lost answers, lost scripts, lost data, no memory, no writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared import keys
from shared.connect import connect, connect_pubsub, connect_sync
from shared.errors import ServiceUnavailableError
from shared.jobs import Owned, Publication
from shared.jobstore import JobStore, SyncJobStore
from shared.keys import JobId
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, last, owned, tokens
from tests.support.redis_proxy import OneAnswerServer, RedisProxy
from tests.support.redis_topology import ClusterServers, SentinelServers, is_one_server

FINE, FENCED = Publication.FINE, Publication.FENCED


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RedisProxy]:
    if not is_one_server(redis_url):
        pytest.skip("the proxy stands in front of one server")
    async with RedisProxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def lane_proxy(redis_server: Any, redis_url: str, store: JobStore, other_lane: int) -> AsyncIterator[RedisProxy]:
    """In front of the server that has lane 0; in a cluster the nodes name it in that server's place."""
    if isinstance(redis_server, SentinelServers):
        pytest.skip("sentinels name the primary itself")
    if not isinstance(redis_server, ClusterServers):
        async with RedisProxy(redis_url) as proxy:
            yield proxy
        return
    await store.lane_load(POOL, 0)  # it knows the nodes by now and does not ask again
    server = redis_server.serving(keys.stats(POOL, 0))
    async with RedisProxy(server.url) as proxy:
        with redis_server.announced(server, proxy.port):
            yield proxy


@pytest.fixture
def other_lane(redis_server: Any) -> int:
    """A further lane of the server that has lane 0: with a call to it that server knows the script."""
    if not isinstance(redis_server, ClusterServers):
        return 9
    server = redis_server.serving(keys.stats(POOL, 0))
    return next(lane for lane in range(8, 64) if redis_server.serving(keys.stats(POOL, lane)) is server)


@pytest.fixture
async def far_store(redis_url: str, lane_proxy: RedisProxy) -> AsyncIterator[JobStore]:
    """A store behind the proxy, on one connection to each node, trying twice."""
    url = lane_proxy.url if is_one_server(redis_url) else redis_url
    client = connect(url, max_connections=1, retry=Retry(NoBackoff(), 1))
    yield JobStore(client)
    await client.aclose()


@asynccontextmanager
async def settings(client: Any, **values: str) -> AsyncIterator[None]:
    """Change the server's settings for a while."""
    before = {name: (await client.config_get(name))[name] for name in values}
    for name, value in values.items():
        await client.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            await client.config_set(name, value)


@pytest.mark.topologies
async def test_every_call_can_be_repeated_when_its_answer_is_lost(
    far_store: JobStore, lane_proxy: RedisProxy, other_lane: int, store: JobStore, client: Any
) -> None:
    job, other = envelope(callback_url="https://example.test"), envelope()
    calls = 0

    async def lossy(call: Any) -> Any:
        nonlocal calls
        lane_proxy.lose, calls = 1, calls + 1
        answer = await call
        assert (lane_proxy.lose, lane_proxy.lost) == (0, calls), "the answer was not lost"
        return answer

    await far_store.submit(envelope(lane=other_lane))
    assert (await lossy(far_store.submit(job))).queued_jobs == 1
    assert (await lossy(far_store.submit(other))).queued_jobs == 2
    await far_store.pull(POOL, other_lane, "w", budget(), KEEP)
    pulled = await lossy(far_store.pull(POOL, 0, "w", budget(), KEEP))
    assert sorted(j.envelope.id for j in pulled.jobs) == sorted([job.id, other.id])
    held = {j.envelope.id: j for j in pulled.jobs}
    assert held[job.id].epoch == 1
    # The scripts are known by now, so that the first answer is the one that counts.
    await far_store.renew("w", [owned(j) for j in pulled.jobs])
    assert await lossy(far_store.renew("w", [owned(j) for j in pulled.jobs])) == [FINE, FINE]
    await far_store.publish([tokens(held[job.id], "w", 1)])
    assert await lossy(far_store.publish([tokens(held[job.id], "w", 2), last(held[job.id], "w", 3)])) == [FINE, FINE]
    await far_store.release("x", owned(held[other.id]))
    assert await lossy(far_store.release("w", owned(held[other.id]))) is True
    await far_store.cancel(job.id)
    assert await lossy(far_store.cancel(other.id)) == "cancelled"
    assert await client.xlen(keys.outbox(POOL, 0)) == 1
    await check_lane(client, [job.id, other.id])


async def test_a_pull_that_failed_for_good_loses_nothing(
    far_store: JobStore, lane_proxy: RedisProxy, other_lane: int, store: JobStore, client: Any
) -> None:
    jobs = [envelope() for _ in range(4)]
    for job in jobs:
        await far_store.submit(job)
    await far_store.pull(POOL, other_lane, "w", budget(), KEEP)
    lane_proxy.lose = 100
    with pytest.raises(ServiceUnavailableError) as caught:
        await far_store.pull(POOL, 0, "w", budget(sequences=2), KEEP)
    lane_proxy.lose = 0
    assert caught.value.retry_after
    assert (await store.lane_load(POOL, 0)).running_jobs == 2
    again = await far_store.pull(POOL, 0, "w", budget(sequences=2), KEEP)
    rest = await far_store.pull(POOL, 0, "w", budget(), KEEP)
    assert [len(again.jobs), len(rest.jobs)] == [2, 2]
    assert {j.envelope.id for j in again.jobs + rest.jobs} == {job.id for job in jobs}
    await check_lane(client, [job.id for job in jobs])


async def test_a_pull_cancelled_in_the_middle_loses_nothing(
    far_store: JobStore, lane_proxy: RedisProxy, other_lane: int, store: JobStore, client: Any
) -> None:
    job = envelope()
    await far_store.submit(job)
    await far_store.pull(POOL, other_lane, "w", budget(), KEEP)
    lane_proxy.hold()
    lane_proxy.requested.clear()
    pull = asyncio.create_task(far_store.pull(POOL, 0, "w", budget(), KEEP))
    await lane_proxy.requested.wait()
    while (await store.status(job.id))[0] != "running":
        await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    lane_proxy.go_on()
    again = await far_store.pull(POOL, 0, "w", budget(), KEEP)
    assert [j.envelope.id for j in again.jobs] == [job.id]


async def test_a_cancelled_command_never_shifts_the_answers(proxy: RedisProxy, client: Any) -> None:
    for i in range(20):
        await client.set(f"k{i}", i, ex=60)
    far: Any = connect(proxy.url, max_connections=1, retry=Retry(NoBackoff(), 1))
    await far.get("k0")
    for i in range(0, 20, 2):
        proxy.hold()
        proxy.requested.clear()
        task = asyncio.create_task(far.get(f"k{i}"))
        await proxy.requested.wait()
        task.cancel()
        proxy.go_on()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await far.get(f"k{i + 1}") == str(i + 1).encode()
    await far.aclose()


async def test_a_cancelled_pipeline_never_shifts_the_answers(
    far_store: JobStore, lane_proxy: RedisProxy, other_lane: int, store: JobStore
) -> None:
    """Cut off with many answers under way, scripts and plain commands, at any of them."""
    for count, lane in enumerate([*range(7), other_lane]):
        for _ in range(count):
            await store.submit(envelope(lane=lane))
    await far_store.lane_loads(POOL, range(8))
    pulled = (await store.pull(POOL, other_lane, "w", budget(), KEEP)).jobs
    await far_store.renew("w", [owned(job) for job in pulled])
    for turn in range(20):
        if turn % 2:
            lane_proxy.hold()
        lane_proxy.requested.clear()
        calls = (far_store.lane_loads(POOL, range(8)), far_store.renew("w", [owned(job) for job in pulled]))
        task = asyncio.create_task(calls[turn % 4 // 2])
        calls[1 - turn % 4 // 2].close()
        await lane_proxy.requested.wait()
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        lane_proxy.go_on()
        loads = await far_store.lane_loads(POOL, range(7))
        assert [load.queued_jobs for load in loads if load is not None] == list(range(7))
        assert await far_store.renew("w", [owned(job) for job in pulled]) == [FINE] * 7


async def test_many_cancelled_callers_leave_the_pool_whole(redis_url: str, client: Any) -> None:
    commands = connect(redis_url, max_connections=1, retry=Retry(NoBackoff(), 1))
    far_store = JobStore(commands)
    jobs = [envelope() for _ in range(60)]
    tasks = [asyncio.create_task(far_store.submit(job)) for job in jobs]
    await tasks[0]
    for task in tasks[1::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for job, answer in zip(jobs, answers, strict=True):
        if not isinstance(answer, BaseException):
            assert (await far_store.get(job.id)).envelope == job
    assert sum(not isinstance(answer, BaseException) for answer in answers) >= 30
    stored = [job.id for job in jobs if await client.exists(keys.job(JobId.parse(job.id)))]
    await check_lane(client, stored)
    await commands.aclose()


async def test_scripts_that_the_server_forgot_are_loaded_again(store: JobStore, client: Any) -> None:
    await store.submit(envelope())
    await client.script_flush()
    await store.submit(other := envelope())
    pulled = await store.pull(POOL, 0, "w", budget(), KEEP)
    await client.script_flush()
    job, second = pulled.jobs
    assert (
        await store.publish([tokens(job, "w", 1), tokens(job, "w", 2), last(job, "w", 3), tokens(second, "w", 1)])
        == [FINE] * 4
    )
    await client.script_flush()
    assert await store.renew("w", [owned(second)]) == [FINE]
    await check_lane(client, [job.envelope.id, other.id])


async def test_an_emptied_server_is_a_fresh_start(store: JobStore, client: Any) -> None:
    await store.submit(envelope())
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await store.submit(envelope())
    await client.flushall()
    assert await store.publish([tokens(held, "w", 1), last(held, "w", 1)]) == [FENCED, FENCED]
    assert await store.renew("w", [owned(held)]) == [FENCED]
    assert await store.release("w", owned(held)) is False
    assert await store.cancel(held.envelope.id) is None
    assert await store.forget(POOL, "w", 16) == 0
    assert (await store.pull(POOL, 0, "w", budget(), NOW)).jobs == []
    assert await client.dbsize() == 0
    await store.submit(job := envelope())
    assert [j.envelope.id for j in (await store.pull(POOL, 0, "w", budget(), NOW)).jobs] == [job.id]
    await check_lane(client, [job.id])


async def test_deleted_streams_stop_nobody(store: JobStore, client: Any) -> None:
    await store.submit(envelope())
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await client.delete(*keys.lane_streams(POOL, 0))
    assert await store.renew("w", [owned(held)]) == [FINE]
    assert (await store.pull(POOL, 0, "v", budget(), NOW)).jobs == []
    assert await store.publish([tokens(held, "w", 1), last(held, "w", 2)]) == [FINE, FINE]
    await store.submit(other := envelope())
    await store.pull(POOL, 0, "v", budget(), NOW)
    await check_lane(client, [held.envelope.id, other.id])


async def test_a_deleted_log_goes_on_and_expires(store: JobStore, client: Any) -> None:
    await store.submit(envelope())
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await store.publish([tokens(held, "w", 1, 2)])
    events = keys.events(JobId.parse(held.envelope.id))
    await client.delete(events)
    assert await store.publish([tokens(held, "w", 3)]) == [FINE]
    assert await store.publish([last(held, "w", 4)]) == [FINE]
    assert await client.pttl(events) > 0


async def test_full_memory_refuses_new_jobs_and_lets_the_others_end(store: JobStore, client: Any) -> None:
    for _ in range(4):
        await store.submit(envelope())
    running, given_back = (await store.pull(POOL, 0, "w", budget(sequences=2), KEEP)).jobs
    async with settings(client, maxmemory="1", **{"maxmemory-policy": "noeviction"}):
        with pytest.raises(ServiceUnavailableError) as caught:
            await store.submit(envelope())
        assert caught.value.retry_after and caught.value.status == 503
        assert await store.publish([tokens(running, "w", 1)]) == [FINE]
        assert await store.renew("w", [owned(running)]) == [FINE]
        assert await store.release("w", owned(given_back)) is True
        assert await store.cancel(given_back.envelope.id) == "cancelled"
        waiting = (await store.pull(POOL, 0, "w", budget(sequences=1), KEEP)).jobs[0]
        assert await store.publish([last(running, "w", 2), last(waiting, "w", 1)]) == [FINE, FINE]
        assert await store.forget(POOL, "w", 16) == 0
    assert (await store.lane_load(POOL, 0)).queued_jobs == 1
    await store.submit(envelope())


async def test_a_replica_is_unavailable(store: JobStore, client: Any, redis_url: str) -> None:
    if not is_one_server(redis_url):
        pytest.skip("with sentinels or in a cluster this is a failover: see test_failover")
    await store.submit(job := envelope())
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        for call in (store.submit(envelope()), store.publish([tokens(held, "w", 1)]), store.cancel(job.id)):
            with pytest.raises(ServiceUnavailableError, match="ReadOnlyError"):
                await call
        async with settings(client, **{"replica-serve-stale-data": "no"}):
            with pytest.raises(ServiceUnavailableError):
                await store.get(job.id)
    finally:
        await client.execute_command("REPLICAOF", "NO", "ONE")
    assert await store.publish([tokens(held, "w", 1)]) == [FINE]


@pytest.mark.parametrize(
    "answer",
    [
        b"-LOADING Redis is loading the dataset in memory",
        b"-MASTERDOWN Link with MASTER is down",
        b"-READONLY You can't write against a read only replica.",
        b"-OOM command not allowed when used memory > 'maxmemory'.",
        b"-MISCONF Errors writing to the AOF file",
        b"-NOREPLICAS Not enough good replicas to write.",
        b"-BUSY Redis is busy running a script.",
        b"-CLUSTERDOWN The cluster is down",
    ],
)
async def test_an_error_that_passes_is_unavailable(answer: bytes) -> None:
    async with OneAnswerServer(answer) as server:
        client = connect(server.url, retry=Retry(NoBackoff(), 1))
        store = JobStore(client)
        for call in (store.submit(envelope()), store.get(envelope().id), store.renew("w", [Owned(envelope().id, 1)])):
            with pytest.raises(ServiceUnavailableError) as caught:
                await call
            assert caught.value.retry_after
        await client.aclose()
        threads = connect_sync(server.url, retry=redis.retry.Retry(NoBackoff(), 1))
        with pytest.raises(ServiceUnavailableError):
            await asyncio.to_thread(SyncJobStore(threads).renew, "w", [Owned(envelope().id, 1)])
        threads.close()


async def test_connections_to_a_demoted_primary_are_dropped() -> None:
    """Behind the same name there may be another server by now."""
    async with OneAnswerServer(b"-READONLY You can't write against a read only replica.") as server:
        client = connect(server.url)
        for n in range(1, 4):
            with pytest.raises(ServiceUnavailableError):
                await JobStore(client).cancel(envelope().id)
            assert server.connections == n
        await client.aclose()


async def test_no_server_is_unavailable() -> None:
    client = connect("redis://127.0.0.1:1/0", retry=Retry(NoBackoff(), 1))
    with pytest.raises(ServiceUnavailableError):
        await JobStore(client).submit(envelope())
    await client.aclose()


async def test_no_turn_is_told_from_no_server(redis_url: str) -> None:
    client = connect(redis_url, max_connections=1, timeout=0.01, retry=Retry(NoBackoff(), 0))
    store, job = JobStore(client), envelope()
    await store.submit(job)
    node = client if isinstance(client, redis.asyncio.Redis) else client.at(await client.primary(f"{{{POOL}.0}}"))
    taken = await node.connection_pool.get_connection()
    with pytest.raises(ServiceUnavailableError, match="wait for a connection") as caught:
        await store.submit(envelope())
    assert caught.value.retry_after
    await node.connection_pool.release(taken)
    await store.submit(envelope())
    await client.aclose()


async def test_wrong_credentials_are_named(redis_url: str) -> None:
    client = connect(redis_url.replace("//", "//:secret@"), retry=Retry(NoBackoff(), 0))
    with pytest.raises(ServiceUnavailableError, match="refused the credentials") as caught:
        await JobStore(client).submit(envelope())
    assert "secret" not in str(caught.value)
    await client.aclose()


async def test_a_server_that_takes_a_subscriber_s_connection_and_says_nothing_is_given_up(proxy: RedisProxy) -> None:
    subscriber = connect_pubsub(proxy.url, socket_connect_timeout=0.1, retry=Retry(NoBackoff(), 1))
    pubsub: Any = subscriber.pubsub()
    proxy.hold()
    with pytest.raises(redis.TimeoutError):
        await pubsub.subscribe("channel")
    proxy.go_on()
    await pubsub.subscribe("channel")
    assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
    for one in (pubsub, subscriber):
        await one.aclose()


async def test_silence_on_a_subscription_is_no_error(proxy: RedisProxy, client: Any) -> None:
    """A time-out for commands that is far shorter than the silence does not touch the subscription."""
    subscriber = connect_pubsub(proxy.url)
    pubsub: Any = subscriber.pubsub()
    await pubsub.subscribe("channel")
    assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
    assert pubsub.connection.socket_timeout is None and pubsub.connection.socket_keepalive
    assert await pubsub.get_message(timeout=0.05) is None
    reader = asyncio.create_task(pubsub.get_message(timeout=None))
    await client.publish("channel", "after the silence")
    assert (await reader)["data"] == b"after the silence"
    await pubsub.aclose()
    await subscriber.aclose()
