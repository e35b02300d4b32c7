"""What every test owes at its end: brought to rest by regular means, a pool leaves nothing behind."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from shared.connect import connect
from shared.jobs import Lease, PullBudget
from shared.keys import CLASSES
from shared.protocol import FINAL_STATUSES
from shared.upkeep import Upkeep
from tests.support.chaos.aftermath import leftovers
from tests.support.redis_topology import raw_client

#: Takes nothing but what a dead worker left, and that only to end it.
_NOTHING = PullBudget(dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0), 0)


async def assert_at_rest(url: str, pool: str, lanes: int) -> None:
    """End what the test left queued or running, as clients, workers and gateways do, and look at what then is there.

    No worker of the pool may be running any more.

    Raises:
        AssertionError: a key that never expires, a counter that is not zero, an entry, a pending one, a consumer
            without a live worker.
    """
    commands, client = connect(url), await raw_client(url)
    try:
        store = Upkeep(commands)
        await _end_all(store, pool, lanes)
        for lane in range(lanes):
            await store.sweep_lane(pool, lane, 0.0)
        found = await leftovers(client, pool, lanes)
        assert not found, "\n".join(found)
    finally:
        await client.aclose()
        await commands.aclose()


async def end_live(url: str, pool: str) -> None:
    """Cancel every job that is not over."""
    commands = connect(url)
    try:
        await _cancel_all(Upkeep(commands), pool)
    finally:
        await commands.aclose()


async def _end_all(store: Upkeep, pool: str, lanes: int) -> None:
    await _cancel_all(store, pool)
    owner = f"at-rest-{uuid.uuid4().hex}"
    for lane in range(lanes):
        # Whoever had it is dead: a cancelled job ends where the next one would take it up.
        await store.pull(pool, lane, owner, _NOTHING, Lease(lease_ms=0))
    await store.forget(pool, owner, lanes)


async def _cancel_all(store: Upkeep, pool: str) -> None:
    ids = [job_id async for job_id in store.job_ids(pool)]
    await asyncio.gather(*(_cancel(store, job_id) for job_id in ids))


async def _cancel(store: Upkeep, job_id: str) -> Any:
    status, _ = await store.status(job_id)
    if status not in FINAL_STATUSES:
        await store.cancel(job_id)
