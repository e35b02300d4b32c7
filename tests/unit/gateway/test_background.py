"""Tasks in the background outlive whatever goes wrong in one of their rounds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis.exceptions

from gateway import load
from gateway.load import PoolLoads
from gateway.metrics import GatewayMetrics
from gateway.sweeper import Sweeper
from shared.errors import ForeignDataError, ServiceUnavailableError
from shared.jobs import LaneLoad

ERRORS = [
    ServiceUnavailableError("away"),
    ForeignDataError("broken"),
    redis.exceptions.NoPermissionError("no"),
    KeyError("x"),
]


class Failing:
    """Raises once for each error, then answers. `rounds` counts calls."""

    def __init__(self) -> None:
        self.errors = list(ERRORS)
        self.rounds = 0
        self.answered = asyncio.Event()

    async def pool_load(self, pool: str, lanes: int) -> LaneLoad:
        self._round()
        return LaneLoad(queued_jobs=7)

    async def class_loads(self, pool: str, lanes: int) -> dict[str, LaneLoad]:
        return {"normal": LaneLoad(queued_jobs=7)}

    async def paused(self, pool: str) -> bool:
        return False

    async def pools(self) -> list[str]:
        self._round()
        return []

    def _round(self) -> None:
        self.rounds += 1
        if self.errors:
            raise self.errors.pop()
        self.answered.set()


async def test_loads_are_looked_at_again_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LOOK_S", 0.001)
    store = Failing()
    catalogue = SimpleNamespace(pools=[SimpleNamespace(card=SimpleNamespace(pool="pool", lanes=4))])
    loads = PoolLoads(cast(Any, store), cast(Any, catalogue))
    task = asyncio.create_task(loads.run())
    async with asyncio.timeout(20):
        await store.answered.wait()
        while loads.of("pool").load.queued_jobs != 7:
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_sweeps_go_on_after_any_error() -> None:
    store = Failing()
    task = asyncio.create_task(Sweeper(cast(Any, store), GatewayMetrics(), 0.001).run())
    async with asyncio.timeout(20):
        await store.answered.wait()
    assert store.rounds > len(ERRORS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
