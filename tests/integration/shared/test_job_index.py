"""Listing a tenant's jobs: in order, over lanes and pools, nobody else's, and gone with the jobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.job_index import JobIndex, Span
from shared.jobs import Lifetime
from shared.keys import JobId
from tests.support.jobs import KEEP, POOL, budget, envelope, last

pytestmark = pytest.mark.topologies
LANES = [(POOL, 0), (POOL, 1), (POOL, 2)]


@pytest.fixture
def store(commands: AsyncClient) -> JobIndex:
    return JobIndex(commands)


async def submit(store: JobIndex, count: int, tenant: str = "t") -> list[JobId]:
    """Jobs over all lanes, the oldest first."""
    ids = []
    for n in range(count):
        job = envelope(lane=n % 3, tenant=tenant, metadata={"n": str(n)}, request_id=f"r{n}")
        await store.submit(job)
        ids.append(JobId.parse(job.id))
    return sorted(ids, key=lambda job_id: job_id.unique)


async def test_the_newest_come_first_over_all_lanes(store: JobIndex, client: Any) -> None:
    ids = await submit(store, 20)
    await submit(store, 5, tenant="other")
    assert await store.ids("t", LANES, Span(), 7) == ids[::-1][:7]
    assert await store.ids("t", LANES, Span(ascending=True), 7) == ids[:7]
    assert len(await store.ids("other", LANES, Span(), 100)) == 5
    assert await store.ids("nobody", LANES, Span(), 7) == []


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("page", [1, 3, 50])
async def test_pages_join_to_the_whole(store: JobIndex, client: Any, ascending: bool, page: int) -> None:
    ids = await submit(store, 11)
    span, got = Span(ascending=ascending), []
    while found := await store.ids("t", LANES, span, page):
        got += found
        span = span.behind(found[-1].unique)
    assert got == (ids if ascending else ids[::-1])


async def test_a_time_bounds(store: JobIndex, client: Any) -> None:
    old = await submit(store, 4)
    await asyncio.sleep(0.005)
    new = await submit(store, 4)
    middle = f"{int(new[0].unique[:12], 16):012x}"
    assert await store.ids("t", LANES, Span(above=middle), 100) == new[::-1]
    assert await store.ids("t", LANES, Span(below=middle), 100) == old[::-1]
    assert await store.ids("t", LANES, Span(above=middle, below=middle), 100) == []


async def test_entries_say_what_a_list_needs(store: JobIndex, client: Any) -> None:
    ids = await submit(store, 3)
    await store.cancel(str(ids[0]))
    await store.delete(str(ids[1]))
    await client.hset(keys.job(ids[2]), "class", "nonsense")
    entries = await store.entries(ids)
    assert [(entry.id, entry.status, entry.head.model) for entry in entries] == [(str(ids[0]), "cancelled", POOL)]
    assert entries[0].head.metadata.keys() == {"n"} and entries[0].submitted_ms and entries[0].job_class == "normal"
    assert await store.entries([]) == []


async def test_jobs_that_have_expired_leave_the_index_with_those_that_come(store: JobIndex, client: Any) -> None:
    for _ in range(6):
        job = envelope(tenant="t")
        await store.submit(job, lifetime=Lifetime(retention_s=0.001))
        pulled = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
        await store.publish([last(pulled, "w", 1)])
    await asyncio.sleep(0.02)
    assert await store.entries(await store.ids("t", LANES, Span(), 100)) == []
    await submit(store, 1, tenant="u")  # whoever it is
    assert await client.zcard(keys.tenant_jobs(POOL, 0, "t")) <= 2
    await submit(store, 1, tenant="u")
    assert await client.zcard(keys.expiring(POOL, 0)) == 2
    assert not await client.exists(keys.tenant_jobs(POOL, 0, "t"))


async def test_the_index_lives_as_long_as_the_longest_of_its_jobs(store: JobIndex, client: Any) -> None:
    long, short = Lifetime(100, 10, 1000), Lifetime(10, 1, 5)
    for lifetime in (short, long, short):
        await store.submit(envelope(tenant="t"), lifetime=lifetime)
    for name in (keys.tenant_jobs(POOL, 0, "t"), keys.expiring(POOL, 0)):
        assert 1_100_000 < await client.pttl(name) <= 1_110_000
