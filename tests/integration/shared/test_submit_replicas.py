"""A submit that waits for replicas: what it accepts is on so many of them, what it refuses may be tried again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from shared import keys
from shared.connect import connect
from shared.errors import OverloadedError, ServiceUnavailableError
from shared.jobs import LaneLimits, ReplicaWait
from shared.jobstore import JobStore
from shared.keys import JobId
from tests.support.jobs import POOL, envelope
from tests.support.redis_topology import Topology, topology_with_replicas

LANES = 16


@pytest.fixture(scope="module", params=[("sentinel", "valkey"), ("cluster", None)], ids=["sentinel", "cluster"])
def topology(request: pytest.FixtureRequest) -> Iterator[Topology]:
    # Valkey for one of them: newer servers count for WAIT what a connection has written, older ones what it has sent.
    kind, server = request.param
    with topology_with_replicas(kind, server=server) as topology:
        yield topology


@pytest.fixture
async def plain(topology: Topology) -> AsyncIterator[JobStore]:
    """A store whose submit waits for nobody."""
    topology.flush()
    client = connect(topology.url)
    yield JobStore(client)
    await client.aclose()


@pytest.fixture
async def careful(topology: Topology) -> AsyncIterator[JobStore]:
    """A store whose submit waits for one replica."""
    client = connect(topology.url)
    yield JobStore(client, replicas=ReplicaWait(1, timeout_ms=300))
    await client.aclose()


async def test_what_is_accepted_is_on_a_replica(topology: Topology, plain: JobStore, careful: JobStore) -> None:
    jobs = [envelope(lane=lane) for lane in range(LANES)]
    for job in jobs:
        assert not (await careful.submit(job)).duplicate
        assert (await careful.submit(job)).duplicate
        key = keys.job(JobId.parse(job.id))
        with topology.replica_of(key).client() as replica:
            if "cluster" in topology.url:
                replica.execute_command("READONLY")
            assert replica.exists(key)
    assert (await plain.pool_load(POOL, LANES)).queued_jobs == LANES


async def test_without_the_replica_nothing_is_accepted(topology: Topology, plain: JobStore, careful: JobStore) -> None:
    job = envelope()
    await careful.submit(envelope())
    with topology.replica_of(keys.stats(POOL, 0)).frozen():
        with pytest.raises(ServiceUnavailableError, match="0 replicas of Redis have the job, 1 must") as caught:
            await careful.submit(job)
        assert caught.value.retry_after
        assert (await plain.status(job.id))[0] == "queued", "whoever submits it takes it back"
        assert await plain.cancel(job.id) == "cancelled"
    assert (await careful.submit(job)).duplicate


async def test_a_repeat_waits_for_what_the_first_call_wrote(
    topology: Topology, plain: JobStore, careful: JobStore
) -> None:
    """The answer to the first was lost with its connection; over another one the repeat writes nothing of its own."""
    job = envelope()
    await careful.submit(envelope())
    with topology.replica_of(keys.stats(POOL, 0)).frozen():
        await plain.submit(job)
        with pytest.raises(ServiceUnavailableError):
            await careful.submit(job)
    assert (await careful.submit(job)).duplicate


async def test_a_full_queue_is_said_first(topology: Topology, plain: JobStore, careful: JobStore) -> None:
    await plain.submit(envelope())
    with topology.replica_of(keys.stats(POOL, 0)).frozen(), pytest.raises(OverloadedError):
        await careful.submit(envelope(), limits=LaneLimits(max_queued_jobs=1))


async def test_only_the_job_s_own_node_is_waited_for(topology: Topology, plain: JobStore, careful: JobStore) -> None:
    frozen = topology.replica_of(keys.stats(POOL, 0))
    others = [lane for lane in range(LANES) if topology.replica_of(keys.stats(POOL, lane)) is not frozen]
    with ExitStack() as stack:
        stack.enter_context(frozen.frozen())
        for lane in others:
            await careful.submit(envelope(lane=lane))
    assert bool(others) is ("cluster" in topology.url)


async def test_with_fewer_replicas_than_wanted_nothing_is_accepted(valkey_url: str) -> None:
    client = connect(valkey_url)
    store = JobStore(client, replicas=ReplicaWait(2, timeout_ms=50))
    with pytest.raises(ServiceUnavailableError):
        await store.submit(envelope())
    await client.aclose()
