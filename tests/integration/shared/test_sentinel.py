"""A job store on a primary that sentinels name, and sentinels that are away, wrong or locked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff

from shared.connect import connect, connect_pubsub, connect_sync
from shared.errors import ServiceUnavailableError
from shared.jobs import Owned, Publication
from shared.jobstore import JobStore, SyncJobStore
from tests.support.jobs import POOL, envelope
from tests.support.redis_topology import SentinelServers


@pytest.fixture(scope="module")
def shared_sentinels() -> Iterator[SentinelServers]:
    with SentinelServers() as sentinels:
        yield sentinels


@pytest.fixture
def sentinels(shared_sentinels: SentinelServers) -> SentinelServers:
    shared_sentinels.flush()
    return shared_sentinels


async def test_a_burst_on_a_client_without_connections_is_served(sentinels: SentinelServers) -> None:
    client = connect(sentinels.url)
    store = JobStore(client)
    await asyncio.gather(*(store.submit(envelope()) for _ in range(200)))
    assert (await store.lane_load(POOL, 0)).queued_jobs == 200
    await client.aclose()


async def test_one_sentinel_that_answers_is_enough(sentinels: SentinelServers) -> None:
    dead = "127.0.0.1:1,127.0.0.1:2,"
    url = sentinels.url.replace("//", f"//{dead}")
    client, threads, subscriber = connect(url), connect_sync(url), connect_pubsub(url)
    job = envelope()
    await JobStore(client).submit(job)
    assert await asyncio.to_thread(SyncJobStore(threads).renew, "w", [Owned(job.id, 1)]) == [Publication.FENCED]
    pubsub = subscriber.pubsub()
    await pubsub.subscribe("rw:x")
    for one in (pubsub, client, subscriber):
        await one.aclose()
    threads.close()


async def test_what_the_sentinels_do_not_know_is_unavailable(sentinels: SentinelServers) -> None:
    for url in (sentinels.url.replace("/main/", "/other/"), "redis+sentinel://127.0.0.1:1,127.0.0.1:2/main/0"):
        client, threads = connect(url, retry=AsyncRetry(NoBackoff(), 0)), connect_sync(url)
        with pytest.raises(ServiceUnavailableError, match="MasterNotFoundError"):
            await JobStore(client).submit(envelope())
        with pytest.raises(ServiceUnavailableError, match="MasterNotFoundError"):
            await asyncio.to_thread(SyncJobStore(threads).renew, "w", [Owned(envelope().id, 1)])
        await client.aclose()
        threads.close()


async def test_sentinels_with_a_password(sentinels: SentinelServers) -> None:
    locked = sentinels.sentinels[0]
    url = f"redis+sentinel://127.0.0.1:{locked.port}/main/0"
    with locked.client() as admin:
        admin.execute_command("ACL", "SETUSER", "asker", "on", ">secret", "allcommands", "allchannels")
        admin.execute_command("AUTH", "asker", "secret")
        admin.execute_command("ACL", "SETUSER", "default", "off")
        try:
            client = connect(f"{url}?sentinel_username=asker&sentinel_password=secret")
            await JobStore(client).submit(envelope())
            await client.aclose()
            client = connect(url, retry=AsyncRetry(NoBackoff(), 0))
            with pytest.raises(ServiceUnavailableError) as caught:
                await JobStore(client).submit(envelope())
            assert "secret" not in str(caught.value)
            await client.aclose()
        finally:
            admin.execute_command("ACL", "SETUSER", "default", "on")
