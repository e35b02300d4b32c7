"""Batches that nobody is at any more, and files whose time is over."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog
from msgspec.structs import replace

from shared.batch_record import BatchRecord, Fault
from shared.batches import Batches, BatchesOverview
from shared.errors import ForeignDataError, NotFoundError
from shared.file_store import FileStore
from shared.task_queue import TaskQueue

log = structlog.stdlib.get_logger("tasks.batch_keeper")

#: Seconds that a batch may be nobody's, between its tasks.
_ABANDONED_S: Final = 3.0
#: Deaths of whoever was at a batch, without a line done in between, after which it is given up.
MOST_DEATHS: Final = 20


class BatchKeeper:
    """What a keeper does for batches; one at a time."""

    def __init__(self, batches: Batches, files: FileStore, queue: TaskQueue, retention_s: float) -> None:
        self._batches, self._files, self._queue, self._retention_s = batches, files, queue, retention_s
        # Of batches that nobody is at: the number of the slice that should be, and since when it is missed.
        self._missed: dict[str, tuple[int, float]] = {}

    async def round(self) -> None:
        """Go on with batches that nobody is at."""
        ids = await self._batches.open_batches()
        for batch_id in ids:
            try:
                await self._look_after(batch_id)
            except ForeignDataError as error:  # it must not keep the others waiting
                log.error("batch passed over", batch=batch_id, error=error.message)
        self._missed = {name: missed for name, missed in self._missed.items() if name in ids}

    async def overview(self) -> BatchesOverview:
        """All batches together, for metrics."""
        return await self._batches.overview()

    async def tidy(self) -> None:
        """Delete files whose time is over."""
        for file_id in await self._batches.expired_files():
            await asyncio.to_thread(self._files.delete, file_id)
            await self._batches.remove_file(file_id)
            log.info("file expired", file=file_id)

    async def _look_after(self, batch_id: str) -> None:
        try:
            record = await self._batches.batch(batch_id)
        except NotFoundError:
            await self._close(batch_id)
            return
        if record.ended:
            await self._close(batch_id)
            return
        if await self._batches.is_running(batch_id) or await self._waits(record):
            self._missed.pop(batch_id, None)
            return
        now = time.monotonic()
        if self._missed.get(batch_id, (-1, now))[0] != record.slices:
            self._missed[batch_id] = record.slices, now
        if now - self._missed[batch_id][1] < _ABANDONED_S:
            return
        del self._missed[batch_id]
        deaths = await self._batches.count_death(batch_id)
        if deaths > MOST_DEATHS:
            await self._give_up(batch_id, deaths)
            return
        record = await self._batches.change(batch_id, lambda held: replace(held, slices=held.slices + 1))
        await asyncio.to_thread(self._queue.run_batch, batch_id, record.slices)
        log.warning("batch begun anew", batch=batch_id, slices=record.slices)

    async def _close(self, batch_id: str) -> None:
        await asyncio.to_thread(self._files.drop_parts, batch_id)
        await self._batches.close_batch(batch_id)

    async def _waits(self, record: BatchRecord) -> bool:
        return await asyncio.to_thread(self._queue.batch_waits, record.id, record.slices)

    async def _give_up(self, batch_id: str, deaths: int) -> None:
        now = await self._batches.clock_ms()
        fault = Fault(code="task_died", message=f"the process that was at the batch died {deaths} times")
        await self._batches.change(
            batch_id,
            lambda held: held if held.ended else replace(held, status="failed", faults=[fault], ended_ms=now),
            self._retention_s,
        )
        await self._close(batch_id)
        log.error("batch given up", batch=batch_id)
