"""Names of adapters that change what they stand for while jobs run, and a store that goes away for a while."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.adapter_record import Content, PendingLoad
from shared.adapters import Adapters
from shared.errors import ServiceUnavailableError
from tests.support.stored_adapters import put_adapter

#: Names are this and a number.
PREFIX = "adapter-"
#: Contents for each name.
_CONTENTS = 3
#: What they change, and how much: enough to be seen, not so much that a model says nothing but one token.
_ADAPTED, _SCALE = ("q_proj", "v_proj"), 0.1
#: Milliseconds that a gateway may have been paused between looking a name up and writing the job.
_SLACK_MS = 5000
#: Seconds between two losses of the store, so that a worker's patience is for each of them.
_STORE_PAUSE_S = 3.0


def name_of(number: int) -> str:
    """The name of the adapter with a number."""
    return f"{PREFIX}{number}"


@dataclass(slots=True)
class _Stay:
    """What a name stood for; Unix milliseconds. Both ends are generous by what the change took."""

    identity: str
    since_ms: int
    until_ms: int | None = None


class ChaosAdapters:
    """Adapters of one pool.

    Args:
        client: straight to Redis.
        store: folder of the store.
        count: of names.
    """

    def __init__(self, client: Any, pool: str, store: Path, count: int, seed: int) -> None:
        self._registry, self._pool, self._store, self._count = Adapters(client), pool, store, count
        self._contents: list[str] = []
        self._stays: dict[str, list[_Stay]] = {name_of(number): [] for number in range(count)}
        self._locks = {name: asyncio.Lock() for name in self._stays}
        self._store_lock = asyncio.Lock()
        self._rng = random.Random(seed)

    async def begin(self, modules: Mapping[str, tuple[int, int]]) -> None:
        """Put contents for these modules into the store and give each name one, by the seed."""
        shapes = {name: shape for name, shape in modules.items() if name.endswith(_ADAPTED)}
        for number in range(_CONTENTS * self._count):
            self._contents.append(await asyncio.to_thread(put_adapter, self._store, number, shapes, scale=_SCALE))
        for name in self._stays:
            await self._load(name)

    def chosen(self, draw: float) -> str:
        """A name, by a number from 0 to below 1."""
        return name_of(int(draw * self._count))

    async def reload(self, name: str) -> None:
        """Have a name stand for something else."""
        async with self._locks[name]:
            await self._load(name)

    async def unload(self, name: str, seconds: float) -> None:
        """Take a name away, and load it again."""
        async with self._locks[name]:
            await _until_done(lambda: self._registry.remove(name))
            self._stays[name][-1].until_ms = _now_ms()
            await asyncio.sleep(seconds)
            await self._load(name)

    @asynccontextmanager
    async def store_away(self) -> AsyncIterator[None]:
        """While nothing can be read."""
        async with self._store_lock:
            away = self._store.with_name("away")
            self._store.rename(away)
            try:
                yield
            finally:
                away.rename(self._store)
            await asyncio.sleep(_STORE_PAUSE_S)

    def could_be(self, name: str | None, identity: str | None, at_ms: int) -> bool:
        """Whether a job of this time may be computed with this content."""
        if name is None or identity is None:
            return name is identity
        return any(
            stay.identity == identity
            and stay.since_ms - _SLACK_MS <= at_ms
            and (stay.until_ms is None or at_ms <= stay.until_ms + _SLACK_MS)
            for stay in self._stays[name]
        )

    async def _load(self, name: str) -> None:
        stays = self._stays[name]
        identity = self._rng.choice([each for each in self._contents if not stays or each != stays[-1].identity])
        began = _now_ms()
        await _until_done(lambda: self._point(name, identity))
        if stays and stays[-1].until_ms is None:
            stays[-1].until_ms = _now_ms()
        stays.append(_Stay(identity, began))

    async def _point(self, name: str, identity: str) -> None:
        load = PendingLoad(version=0, source="chaos")
        record, *_ = await self._registry.begin(name, self._pool, load, replace=True)
        if record.pending is None:
            raise RuntimeError("a load that was begun is not under way")
        content = Content(identity=identity, rank=4, bytes=1)
        await self._registry.finish(name, record.pending.version, content, _now_ms())


async def _until_done(change: Callable[[], Awaitable[object]]) -> None:
    """Make a change again until it succeeds: Redis may be away or full."""
    while True:
        try:
            await change()
            return
        except ServiceUnavailableError:
            await asyncio.sleep(0.2)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
