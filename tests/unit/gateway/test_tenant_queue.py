"""Looks at what a tenant has queued: shared by all that are refused, few in a flood, again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from gateway import tenant_queue
from gateway.tenant_queue import TenantQueues
from shared.errors import ServiceUnavailableError
from shared.jobs import QueuedCount, QueuedLimits
from shared.tenants import Tenants


class FakeTenants:
    """Counts in memory; `stale` are jobs that count and are not queued."""

    def __init__(self) -> None:
        self.jobs: set[str] = set()
        self.stale: set[str] = set()
        self.looks = 0
        self.away = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def enter(self, tenant: str, limits: QueuedLimits, jobs: Mapping[str, int], ttl_s: float) -> QueuedCount:
        allowed = limits.jobs is None or len(self.jobs | jobs.keys()) <= limits.jobs
        if allowed:
            self.jobs |= jobs.keys()
        return QueuedCount(allowed, len(self.jobs), 0)

    async def settle(self, tenant: str) -> int:
        self.looks += 1
        await self.gate.wait()
        if self.away:
            raise ServiceUnavailableError("away")
        self.jobs -= self.stale
        return len(self.stale)


class Limited:
    """Queues with the same limit for all tenants."""

    def __init__(self, tenants: FakeTenants, jobs: int) -> None:
        self._queues, self._limits = TenantQueues(cast(Tenants, tenants), 60.0), QueuedLimits(jobs=jobs)

    async def enter(self, tenant: str, jobs: Mapping[str, int]) -> QueuedCount:
        return await self._queues.enter(tenant, self._limits, jobs)


def queues(tenants: FakeTenants, jobs: int) -> Limited:
    return Limited(tenants, jobs)


async def test_all_that_are_refused_at_once_share_a_look_and_go_by_it() -> None:
    tenants = FakeTenants()
    tenants.jobs, tenants.stale = {"a", "b", "c"}, {"a", "b"}
    tenants.gate.clear()
    limited = queues(tenants, 3)
    asking = [asyncio.create_task(limited.enter("t", {str(n): 1})) for n in range(5)]
    while not tenants.looks:
        await asyncio.sleep(0)
    asking[0].cancel()  # its client has gone; the others still wait
    tenants.gate.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert tenants.looks == 1
    assert [a.allowed for a in answers if isinstance(a, QueuedCount)] == [True, True, False, False]


async def test_a_flood_of_refusals_looks_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(tenant_queue.time, "monotonic", lambda: now[0])
    tenants = FakeTenants()
    tenants.jobs = {str(n) for n in range(5000)}
    limited = queues(tenants, 5000)
    for _ in range(100):
        assert not (await limited.enter("t", {"x": 1})).allowed
    assert tenants.looks == 1
    now[0] += 5000 * tenant_queue.LOOK_S_PER_JOB - 0.1
    await limited.enter("t", {"x": 1})
    assert tenants.looks == 1
    now[0] += 0.2
    await limited.enter("t", {"x": 1})
    assert tenants.looks == 2
    await limited.enter("other", {"y": 1})
    assert tenants.looks == 3, "each tenant has looks of its own"


async def test_a_look_that_failed_is_made_again() -> None:
    tenants = FakeTenants()
    tenants.jobs, tenants.stale, tenants.away = {"a"}, {"a"}, True
    limited = queues(tenants, 1)
    with pytest.raises(ServiceUnavailableError):
        await limited.enter("t", {"b": 1})
    tenants.away = False
    assert (await limited.enter("t", {"b": 1})).allowed
