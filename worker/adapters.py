"""The pool's adapters as a worker sees them: their files, and which of them are to be in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import structlog
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, stop_when_event_set, wait_random_exponential
from tenacity.nap import sleep_using_event

from shared.adapter_record import AdapterRecord
from shared.adapter_store import AdapterStore, StoreUnavailableError
from shared.adapters import Adapters
from shared.errors import AdapterError, EngineError, ProtocolError
from worker.loop import EngineLoop
from worker.publisher import REDIS_TROUBLE

_log = structlog.stdlib.get_logger("worker.adapters")

#: Seconds that a store that is away, or does not have an adapter yet, is asked again before the requests that wait for
#: the adapter fail.
PATIENCE_S = 15.0
#: Seconds after which all records are read anew although nothing is known to have changed.
_ANEW_S = 60.0


class StoreSource:
    """The store, with patience; see `engine.adapters.library.AdapterSource`. Called in threads beside the steps."""

    def __init__(self, store: AdapterStore, patience_s: float = PATIENCE_S) -> None:
        self._store, self._patience_s = store, patience_s
        self._closed = threading.Event()

    def folder(self, identity: str) -> Path:
        """The adapter's local folder.

        Raises:
            AdapterError: its files are not what they should be.
            StoreUnavailableError: the store is away, or does not have it, for longer than the patience.
        """
        attempts = Retrying(
            retry=retry_if_exception_type(StoreUnavailableError),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            stop=stop_after_delay(self._patience_s) | stop_when_event_set(self._closed),
            sleep=sleep_using_event(self._closed),
            reraise=True,
        )
        try:
            return attempts(self._store.folder, identity)
        except (AdapterError, StoreUnavailableError):
            raise
        except Exception as error:
            _log.exception("the adapter store failed", identity=identity)
            raise EngineError("the adapter could not be read") from error

    def discard(self, identity: str) -> None:
        """Have a damaged copy made anew the next time."""
        self._store.discard_copy(identity)

    def close(self) -> None:
        """Whoever waits for the store gives up."""
        self._closed.set()


class AdapterWatch:
    """Tells the engine which adapters the pool has pinned, and which of those that it has nobody needs any more.

    That is those that no name stands for, and no job pins that is queued or runs anywhere: of such jobs the next one
    may come when the last one here has just ended.

    Args:
        interval_s: between looks without a message; a message may have been lost.
    """

    def __init__(self, store: Adapters, pool: str, lanes: int, loop: EngineLoop, interval_s: float) -> None:
        self._store, self._pool, self._lanes, self._loop, self._interval_s = store, pool, lanes, loop, interval_s
        self._news = asyncio.Event()
        self._revision = -1
        self._records: list[AdapterRecord] = []
        self._read_at = float("-inf")
        self._told: tuple[dict[str, str], frozenset[str]] = {}, frozenset()

    def look(self) -> None:
        """The pool's adapters are others."""
        self._news.set()

    async def run(self) -> None:
        """Look until cancelled. Redis being away is no error: the next look tries again."""
        while True:
            try:
                await self._look()
            except (*REDIS_TROUBLE, ProtocolError) as error:
                _log.warning("cannot read the pool's adapters, trying again", error=repr(error))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()

    async def _look(self) -> None:
        # Before the registry is read: what is in memory now had a name, or it has lost it.
        stats = self._loop.stats.adapters
        there = {*stats.resident, *stats.in_memory, *stats.failed}
        revision, now = await self._store.revision(), time.monotonic()
        if revision != self._revision or now - self._read_at > _ANEW_S:
            self._records = await self._store.records(self._pool)
            self._revision, self._read_at = revision, now
        pinned = {record.identity: record.name for record in self._records if record.pinned and record.identity}
        retired = frozenset(there - {record.identity for record in self._records})
        if retired:
            flying = await self._store.in_flight(self._pool, self._lanes)
            retired = frozenset(identity for identity in retired if not flying[identity])
        # A pinned one that could not be read is tried again when it is told again.
        if pinned or (pinned, retired) != self._told:
            self._told = pinned, retired
            self._loop.keep_adapters(pinned, retired)
