"""A job store on a Redis Cluster whose nodes go away, forget scripts and hand slots over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared import keys
from shared.connect import connect, connect_pubsub, connect_sync
from shared.errors import ForeignDataError, ServiceUnavailableError
from shared.jobs import Publication, PulledJob
from shared.jobstore import JobStore, SyncJobStore
from shared.keys import JobId
from shared.upkeep import Upkeep
from tests.support.jobs import KEEP, POOL, budget, check_lane, envelope, last, owned, tokens
from tests.support.redis_server import RedisServer
from tests.support.redis_topology import ClusterServers, raw_client

FINE, AWAY = Publication.FINE, Publication.AWAY
LANES = 16


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[ClusterServers]:
    with ClusterServers() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ClusterServers) -> Iterator[ClusterServers]:
    """An empty cluster of three primaries; whoever was killed is back afterwards."""
    shared_cluster.flush()
    yield shared_cluster
    for server in shared_cluster.servers:
        if server.process is None:
            server.start()
    shared_cluster.until_whole()


@pytest.fixture
async def store(cluster: ClusterServers) -> AsyncIterator[Upkeep]:
    """A store that does not try again where a node is away."""
    client = connect(cluster.url, retry=AsyncRetry(NoBackoff(), 0))
    yield Upkeep(client)
    await client.aclose()


@pytest.fixture
def sync_store(cluster: ClusterServers) -> Iterator[SyncJobStore]:
    client = connect_sync(cluster.url, retry=Retry(NoBackoff(), 0))
    yield SyncJobStore(client)
    client.close()


def lanes_by_server(cluster: ClusterServers) -> dict[RedisServer, list[int]]:
    found: dict[RedisServer, list[int]] = {}
    for lane in range(LANES):
        found.setdefault(cluster.serving(keys.stats(POOL, lane)), []).append(lane)
    assert len(found) == 3, "every node should have some lanes"
    return found


async def running(store: JobStore, lanes: list[int]) -> list[PulledJob]:
    """A running job in each of these lanes, owned by `w`."""
    jobs = []
    for lane in lanes:
        await store.submit(envelope(lane=lane))
        jobs += (await store.pull(POOL, lane, "w", budget(), KEEP)).jobs
    assert len(jobs) == len(lanes)
    return jobs


async def test_one_pipeline_reaches_all_nodes_and_keeps_the_order(
    cluster: ClusterServers, store: JobStore, sync_store: SyncJobStore
) -> None:
    jobs = await running(store, list(range(LANES)))
    items = [tokens(job, "w", seq) for seq in (1, 2) for job in jobs]
    assert await store.publish(items) == [FINE] * len(items)
    items = [tokens(job, "w", seq) for seq in (3, 4) for job in jobs] + [last(job, "w", 5) for job in jobs]
    assert await asyncio.to_thread(sync_store.publish, items) == [FINE] * len(items)
    client = await raw_client(cluster.url)
    for lane, job in enumerate(jobs):
        await check_lane(client, [job.envelope.id], lane)
    await client.aclose()
    assert [load for load in await store.lane_loads(POOL, range(LANES)) if load is None or load.running_jobs] == []


async def test_a_script_that_one_node_has_forgotten_is_brought_there(
    cluster: ClusterServers, store: JobStore, sync_store: SyncJobStore
) -> None:
    jobs = await running(store, list(range(LANES)))
    await store.publish([tokens(job, "w", 1) for job in jobs])
    for server, count in zip(cluster.servers, (2, 3, 4), strict=True):
        with server.client() as client:
            client.script_flush()
        items = [tokens(job, "w", count) for job in jobs]
        if count == 3:
            assert await asyncio.to_thread(sync_store.publish, items) == [FINE] * LANES
        else:
            assert await store.publish(items) == [FINE] * LANES
    assert {(await store.status(job.envelope.id))[1] for job in jobs} == {4}


async def test_a_node_that_is_away_takes_only_its_lanes_along(
    cluster: ClusterServers, store: Upkeep, sync_store: SyncJobStore
) -> None:
    jobs = await running(store, list(range(LANES)))
    await store.publish([tokens(job, "w", 1) for job in jobs])
    lost, lanes = next(iter(lanes_by_server(cluster).items()))
    await asyncio.to_thread(lost.kill)

    expected = [AWAY if job.envelope.id.split(".")[1] in map(str, lanes) else FINE for job in jobs]
    assert FINE in expected and AWAY in expected
    assert await store.publish([tokens(job, "w", 2) for job in jobs]) == expected
    assert await asyncio.to_thread(sync_store.publish, [tokens(job, "w", 3) for job in jobs]) == expected
    held = [owned(job) for job in jobs]
    assert await store.renew("w", held) == expected
    assert await asyncio.to_thread(sync_store.renew, "w", held) == expected
    loads = await store.lane_loads(POOL, range(LANES))
    assert [n for n, load in enumerate(loads) if load is None] == lanes
    assert all(load.running_jobs == 1 for load in loads if load is not None)
    for call in (
        store.pool_load(POOL, LANES),
        store.submit(envelope(lane=lanes[0])),
        store.pull(POOL, lanes[0], "w", budget(), KEEP),
        store.forget(POOL, "w", LANES),
        store.renew("w", [held[lanes[0]]]),
    ):
        with pytest.raises(ServiceUnavailableError) as caught:
            await call
        assert caught.value.retry_after
    healthy = next(lane for lane in range(LANES) if lane not in lanes)
    await store.submit(envelope(lane=healthy))
    assert len((await store.pull(POOL, healthy, "w", budget(), KEEP)).jobs) == 1


async def test_a_node_that_is_silent_is_not_waited_for(cluster: ClusterServers, store: JobStore) -> None:
    jobs = await running(store, list(range(LANES)))
    await store.publish([tokens(job, "w", 1) for job in jobs])
    silent, lanes = next(iter(lanes_by_server(cluster).items()))
    patient, threads = connect(cluster.url, socket_timeout=None), connect_sync(cluster.url, socket_timeout=None)
    stores = JobStore(patient), SyncJobStore(threads)
    items = [tokens(job, "w", 2) for job in jobs]
    assert await stores[0].publish(items) == await asyncio.to_thread(stores[1].publish, items) == [FINE] * LANES
    expected = [AWAY if lane in lanes else FINE for lane in range(LANES)]
    with silent.frozen():
        for seq in (3, 4):
            items = [tokens(job, "w", seq) for job in jobs]
            assert await stores[0].publish(items) == expected
            assert await asyncio.to_thread(stores[1].publish, items) == expected
    # What was late arrives at last, as a repeat or not; nothing is missing and nothing twice.
    assert await store.publish([tokens(job, "w", 3, 2) for job in jobs]) == [FINE] * LANES
    client = await raw_client(cluster.url)
    for lane, job in enumerate(jobs):
        await check_lane(client, [job.envelope.id], lane)
    threads.close()
    for one in (patient, client):
        await one.aclose()


async def test_everybody_away_is_an_error(cluster: ClusterServers, store: JobStore, sync_store: SyncJobStore) -> None:
    (job,) = await running(store, [0])
    for server in cluster.servers:
        await asyncio.to_thread(server.kill)
    for call in (store.lane_loads(POOL, [0, 1, 2]), store.now_ms()):
        with pytest.raises(ServiceUnavailableError):
            await call
    with pytest.raises(ServiceUnavailableError):
        await asyncio.to_thread(sync_store.renew, "w", [owned(job)])
    # But frames wait each for its own node: those of others, which are not in this pipeline, can be sent.
    assert await store.publish([tokens(job, "w", 1)]) == [Publication.AWAY]
    assert await asyncio.to_thread(sync_store.publish, [tokens(job, "w", 1)]) == [Publication.AWAY]
    fresh = connect(cluster.url, retry=AsyncRetry(NoBackoff(), 0))
    with pytest.raises(ServiceUnavailableError):
        await JobStore(fresh).submit(envelope())
    await fresh.aclose()


async def test_a_lane_that_moves_to_another_node_is_followed(cluster: ClusterServers, store: JobStore) -> None:
    """As `redis-cli --cluster reshard` does it: key by key, with ASK and TRYAGAIN on the way, and MOVED at the end."""
    job, key = envelope(), keys.stats(POOL, 0)
    await store.submit(job)
    source = cluster.serving(key)
    target = next(server for server in cluster.servers if server is not source)
    with cluster.moving(key, source, target) as move:
        move(keys.job(JobId.parse(job.id)))
        assert (await store.status(job.id))[0] == "queued", "ASK"
        for call in (store.pull(POOL, 0, "w", budget(), KEEP), store.submit(envelope())):
            with pytest.raises(ServiceUnavailableError, match="TryAgainError"):
                await call
    (taken,) = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs  # MOVED
    assert taken.envelope == job
    assert await store.publish([tokens(taken, "w", 1)]) == [FINE]
    assert await store.node(POOL, 0) == f"127.0.0.1:{target.port}"
    with cluster.moving(key, target, source):
        pass
    threads = connect_sync(cluster.url)
    assert await asyncio.to_thread(SyncJobStore(threads).publish, [last(taken, "w", 2)]) == [FINE]
    threads.close()
    assert (await store.status(job.id))[0] == "completed"


async def test_a_lane_that_moves_as_a_whole_misses_nothing() -> None:
    """Valkey 9 moves slots atomically: not one call fails, and nothing is lost."""
    with ClusterServers(server="valkey") as cluster:
        client, key = connect(cluster.url), keys.stats(POOL, 0)
        store = JobStore(client)
        (job,) = await running(store, [0])
        source = cluster.serving(key)
        target = next(server for server in cluster.servers if server is not source)
        seq, moved = 0, asyncio.create_task(asyncio.to_thread(cluster.move_whole, key, source, target))
        while not moved.done() or seq < 100:
            seq += 1
            assert await store.publish([tokens(job, "w", seq)]) == [FINE]
        await moved
        assert await store.publish([last(job, "w", seq + 1)]) == [FINE]
        assert await store.node(POOL, 0) == f"127.0.0.1:{target.port}"
        raw = await raw_client(cluster.url)
        await check_lane(raw, [job.envelope.id])
        for one in (raw, client):
            await one.aclose()


async def test_a_subscription_moves_to_another_node_when_its_own_dies(cluster: ClusterServers, store: JobStore) -> None:
    lanes = {server.port: lanes[0] for server, lanes in lanes_by_server(cluster).items()}
    subscriber = connect_pubsub(cluster.url)
    pubsub: Any = subscriber.pubsub()
    await pubsub.subscribe(keys.wake(POOL))
    assert (await pubsub.get_message(timeout=10))["type"] == "subscribe"
    port = pubsub.connection.port
    for lane in lanes.values():  # whichever node a lane is on, every node's subscribers hear it
        await store.submit(envelope(lane=lane))
        assert (await pubsub.get_message(timeout=10))["data"] == str(lane).encode()

    await asyncio.to_thread(next(server for server in cluster.servers if server.port == port).kill)
    with pytest.raises(redis.ConnectionError):
        await pubsub.get_message(timeout=10)
    await pubsub.subscribe(keys.wake(POOL))
    assert (await pubsub.get_message(timeout=10))["type"] == "subscribe"
    assert pubsub.connection.port != port
    lane = next(lane for served_by, lane in lanes.items() if served_by != port)
    await store.submit(envelope(lane=lane))
    async with asyncio.timeout(10):
        while (message := await pubsub.get_message(timeout=10))["type"] != "message":
            pass
    assert message["data"] == str(lane).encode()
    await pubsub.aclose()
    await subscriber.aclose()


async def test_a_subscription_passes_a_silent_node_over(cluster: ClusterServers) -> None:
    subscribers = [connect_pubsub(cluster.url, socket_connect_timeout=0.5) for _ in range(8)]
    pubsubs: list[Any] = [subscriber.pubsub() for subscriber in subscribers]
    with cluster.servers[0].frozen():
        async with asyncio.timeout(60):
            await asyncio.gather(*(pubsub.subscribe(keys.wake(POOL)) for pubsub in pubsubs))
        ports = {pubsub.connection.port for pubsub in pubsubs}
    assert cluster.servers[0].port not in ports
    for one in (*pubsubs, *subscribers):
        await one.aclose()


async def test_readers_are_counted_wherever_they_are(cluster: ClusterServers, store: JobStore) -> None:
    job = envelope()
    assert await store.readers(job.id) == 0
    subscriber = connect_pubsub(cluster.url)
    pubsub: Any = subscriber.pubsub()
    await pubsub.subscribe(keys.events(JobId.parse(job.id)))
    assert (await pubsub.get_message(timeout=10))["type"] == "subscribe"
    assert await store.readers(job.id) == 1
    gone = next(server for server in cluster.servers if server.port != pubsub.connection.port)
    await asyncio.to_thread(gone.kill)
    assert await store.readers(job.id) == 1
    await pubsub.aclose()
    await subscriber.aclose()
    async with asyncio.timeout(30):
        while await store.readers(job.id) == 1:  # until the server has noticed
            await asyncio.sleep(0.01)
    assert await store.readers(job.id) is None, "it might have one there"


async def test_all_jobs_of_a_pool_are_found(cluster: ClusterServers, store: Upkeep) -> None:
    ids = {(await running(store, [lane]))[0].envelope.id for lane in range(LANES)}
    assert {job_id async for job_id in store.job_ids(POOL)} == ids


async def test_one_server_is_told_from_a_cluster(cluster: ClusterServers, valkey_server: RedisServer) -> None:
    plain = connect(f"redis://127.0.0.1:{cluster.servers[0].port}")
    with pytest.raises(ServiceUnavailableError, match=r"redis\+cluster://"):
        for lane in range(LANES):
            await JobStore(plain).submit(envelope(lane=lane))
    await plain.aclose()
    if not isinstance(valkey_server, RedisServer):
        return
    wrong = connect(f"redis+cluster://127.0.0.1:{valkey_server.port}")
    with pytest.raises(ForeignDataError, match="cluster support disabled"):
        await JobStore(wrong).submit(envelope())
    await wrong.aclose()
