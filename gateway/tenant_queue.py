"""How much each tenant has queued, over all lanes of all pools: counted when it enters, looked after when it is full.

A tenant's count is a key of its own, in another slot of a cluster than its jobs, so it cannot change in one step with
them. It is raised before a submit, and never lowered by those who end jobs. Whoever is refused has all jobs asked for
their status first: so what started, ended, expired, was cancelled or never came cannot be counted for long, and costs
nothing while there is room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from shared.jobs import QueuedCount, QueuedLimits
from shared.tenants import Tenants

#: Seconds that a look holds for at least, and for each job that it was about: a flood of refusals costs few looks.
LOOK_S: Final = 1.0
LOOK_S_PER_JOB: Final = 0.001


class TenantQueues:
    """Counts the queued jobs of tenants against the limits of each.

    Args:
        ttl_s: seconds without a job after which a tenant's count is forgotten; no job is queued for longer.
    """

    def __init__(self, tenants: Tenants, ttl_s: float) -> None:
        self._tenants, self._ttl_s = tenants, ttl_s
        self._looks: dict[str, asyncio.Task[int]] = {}
        self._looked_until: dict[str, float] = {}

    async def enter(self, tenant: str, limits: QueuedLimits, jobs: Mapping[str, int]) -> QueuedCount:
        """Count jobs, given with their costs in tokens, as queued: all of them, or none.

        Raises:
            ServiceUnavailableError: Redis is away.
        """
        count = await self._tenants.enter(tenant, limits, jobs, self._ttl_s)
        if not count.allowed and await self._look(tenant, count.jobs):
            count = await self._tenants.enter(tenant, limits, jobs, self._ttl_s)
        return count

    async def leave(self, tenant: str, jobs: Mapping[str, int]) -> None:
        """Count jobs no longer that will not be submitted after all. Raises ServiceUnavailableError."""
        await self._tenants.leave(tenant, list(jobs))

    async def _look(self, tenant: str, jobs: int) -> bool:
        """Leave out what is not queued any more; False where that was done just now. All that wait share one look."""
        look = self._looks.get(tenant)
        if look is None:
            if time.monotonic() < self._looked_until.get(tenant, 0.0):
                return False
            look = self._looks[tenant] = asyncio.create_task(self._tenants.settle(tenant))
            look.add_done_callback(lambda done: self._looked(done, tenant, jobs))
        # Shielded: one caller may go away while the others wait.
        await asyncio.shield(look)
        return True

    def _looked(self, look: asyncio.Task[int], tenant: str, jobs: int) -> None:
        del self._looks[tenant]
        if look.cancelled() or look.exception() is not None:  # whoever waits has it, and the next one looks again
            return
        self._looked_until[tenant] = time.monotonic() + max(LOOK_S, jobs * LOOK_S_PER_JOB)
