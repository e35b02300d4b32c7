"""What must happen though nobody asks for it: retries whose time has come, loads that nobody is at any more, contents
and leftovers that nobody needs. Any number of tasks processes do it in turns.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Final

import structlog

from shared.adapter_record import AdapterRecord, PendingLoad
from shared.adapter_store import AdapterStore, discard_upload
from shared.adapters import Adapters
from shared.errors import RopewayError
from shared.redis_errors import TROUBLE
from shared.task_queue import TaskQueue
from tasks.batch_keeper import BatchKeeper
from tasks.metrics import TasksMetrics
from tasks.scheduler import TaskScheduler

_log = structlog.stdlib.get_logger("tasks.keeper")

#: Seconds that a load may be nobody's: from the request to its task, from its task to its first sign of life.
_ABANDONED_S: Final = 10.0
#: How often a load is begun anew after a death.
_MOST_STARTS: Final = 3
#: Rounds of the keeper between looks for what nobody needs.
_TIDY_ROUNDS: Final = 12
#: Seconds after which an upload, or half a copy, is nobody's.
_LEFTOVER_S: Final = 24 * 3600.0
#: Rounds that may be missed before this process counts as gone.
_MISSED: Final = 4
#: Seconds that a round may take without anybody else at its work.
_SLOW_ROUND_S: Final = 5.0


def lock_s(every_s: float) -> float:
    """Seconds after which another process puts tasks back into the queue, given the seconds between rounds."""
    return _MISSED * every_s / 2 + _SLOW_ROUND_S


class Keeper:
    """One of the keepers of a deployment.

    Args:
        scheduler: puts tasks back into the queue whose time has come.
        every_s: seconds between rounds.
        retention_s: how long contents stay in the store that no name points to.
    """

    def __init__(
        self,
        adapters: Adapters,
        store: AdapterStore,
        queue: TaskQueue,
        scheduler: TaskScheduler,
        metrics: TasksMetrics,
        batches: BatchKeeper,
        *,
        every_s: float,
        retention_s: float,
    ) -> None:
        self._adapters, self._store, self._queue, self._scheduler = adapters, store, queue, scheduler
        self._metrics, self._every_s, self._retention_s = metrics, every_s, retention_s
        self._batches = batches
        self._name = uuid.uuid4().hex
        self._rounds = 0
        #: Loads at which nobody was seen, since when; a task that is just being begun is such for a moment.
        self._missed: dict[tuple[str, int, int], float] = {}
        self.looked_at = time.monotonic()
        self.seen_redis = 0.0

    async def run(self) -> None:
        """Look after everything until cancelled."""
        while True:
            self.looked_at = time.monotonic()
            try:
                await self.round()
                self.seen_redis = time.monotonic()
            except (RopewayError, *TROUBLE) as error:
                self._metrics.errors.inc()
                _log.warning("upkeep failed, trying again", error=repr(error))
            except Exception:  # noqa: BLE001 - without this loop, loads that died would never be seen
                self._metrics.errors.inc()
                _log.exception("upkeep failed, trying again")
            await asyncio.sleep(self._every_s)

    async def round(self) -> None:
        """Look once, unless another keeper does."""
        await self._adapters.tasks_alive(_MISSED * self._every_s + _ABANDONED_S)
        await asyncio.to_thread(self._scheduler.queue_due)
        self._metrics.batches.overview = await self._batches.overview()
        if not await self._adapters.lock_keeper(self._name, 0.9 * self._every_s):
            return
        records = await self._adapters.records()
        self._metrics.records(records)
        for record in records:
            if record.pending is not None:
                await self._look_after(record, record.pending)
        under_way = {(r.name, r.pending.version, r.pending.starts) for r in records if r.pending is not None}
        self._missed = {load: since for load, since in self._missed.items() if load in under_way}
        await self._batches.round()
        if self._rounds % _TIDY_ROUNDS == 0:
            await self.tidy()
        self._rounds += 1

    async def tidy(self) -> None:
        """Delete what nobody needs."""
        await self._forget_drained()
        await self._delete_unused()
        await asyncio.to_thread(self._store.sweep, _LEFTOVER_S)
        await self._batches.tidy()

    async def _look_after(self, record: AdapterRecord, pending: PendingLoad) -> None:
        """Begin a load anew that nobody is at, or give it up."""
        name, load = record.name, (record.name, pending.version, pending.starts)
        if await self._adapters.is_loading(*load[:2]) or await asyncio.to_thread(self._queue.waits, name, pending):
            self._missed.pop(load, None)
            return
        if time.monotonic() - self._missed.setdefault(load, time.monotonic()) < _ABANDONED_S:
            return
        del self._missed[load]
        if pending.starts >= _MOST_STARTS:
            why = f"the load was given up: the process that was at it died {pending.starts + 1} times"
            await self._adapters.fail(name, pending.version, why)
            await asyncio.to_thread(discard_upload, pending.source, lambda: self._store)
            _log.error("load given up", adapter=name, version=pending.version)
            return
        now = await self._adapters.clock_ms()
        again = await self._adapters.restart(name, pending.version, now)
        if again is not None:
            await asyncio.to_thread(self._queue.load_adapter, name, again)
            self._metrics.restarted.inc()
            _log.warning("load begun anew", adapter=name, version=again.version, starts=again.starts)

    async def _forget_drained(self) -> None:
        for record in await self._adapters.drained():
            card = await self._adapters.get_card(record.pool)
            flying = {} if card is None else await self._adapters.in_flight(record.pool, card.lanes)
            if not flying.get(record.identity or "", 0):
                await self._adapters.forget_drained(record)

    async def _delete_unused(self) -> None:
        until = await self._adapters.clock_ms() - round(self._retention_s * 1e3)
        unused = await self._adapters.unused(until)
        if not unused:
            return
        # Read behind the list: whoever has put a content on it since is at a load, or its name has the content.
        records = await self._adapters.records()
        if any(record.pending is not None for record in records):
            return
        used = {record.identity for record in records}
        flying = await self._in_flight()
        for identity, since in unused.items():
            if identity in used:
                await self._adapters.is_used(identity, since)
            elif identity not in flying and await self._adapters.may_delete(identity, since):
                await asyncio.to_thread(self._store.delete, identity)
                await self._adapters.deleted(identity, since)
                self._metrics.deleted.inc()
                _log.info("adapter deleted from the store", identity=identity)

    async def _in_flight(self) -> set[str]:
        found: set[str] = set()
        for pool in await self._adapters.pools():
            card = await self._adapters.get_card(pool)
            if card is not None:
                found |= set(await self._adapters.in_flight(pool, card.lanes))
        return found
