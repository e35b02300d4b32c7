"""What sees that webhooks are owed, and has them sent. Any number of tasks processes do it, each for itself."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog

from shared.errors import RopewayError
from shared.redis_errors import TROUBLE
from shared.task_queue import TaskQueue
from shared.webhooks import Lane, Webhooks, summed
from tasks.metrics import TasksMetrics

_log = structlog.stdlib.get_logger("tasks.webhook_keeper")

#: Seconds between looks for pools, and at lanes that a pool of fewer lanes may have left behind.
_POOLS_S: Final = 30.0
#: Longest pause where looks fail.
_LONGEST_PAUSE_S: Final = 15.0


class WebhookKeeper:
    """Looks at all lanes every `every_s` seconds."""

    def __init__(self, webhooks: Webhooks, queue: TaskQueue, metrics: TasksMetrics, every_s: float) -> None:
        self._webhooks, self._queue, self._metrics, self._every_s = webhooks, queue, metrics, every_s
        self._lanes: list[Lane] = []
        self._pools_at = float("-inf")

    async def run(self) -> None:
        """Look until cancelled."""
        pause = self._every_s
        while True:
            try:
                await self.round()
                pause = self._every_s
            except (RopewayError, *TROUBLE) as error:
                pause = min(_LONGEST_PAUSE_S, 2 * pause)
                self._metrics.errors.inc()
                _log.warning("webhooks are not looked at, trying again", error=repr(error))
            except Exception:  # noqa: BLE001 - without this loop no webhook would be sent
                pause = min(_LONGEST_PAUSE_S, 2 * pause)
                self._metrics.errors.inc()
                _log.exception("webhooks are not looked at, trying again")
            await asyncio.sleep(pause)

    async def round(self) -> None:
        """Look once."""
        lanes = self._lanes
        if time.monotonic() - self._pools_at >= _POOLS_S or not lanes:
            lanes, self._lanes = await self._webhooks.lanes(every=True), await self._webhooks.lanes()
            self._pools_at = time.monotonic()
        surveys = await self._webhooks.survey(lanes)
        pending, oldest_ms = summed(surveys)
        age_s = 0.0 if oldest_ms is None else max(0.0, (await self._webhooks.now_ms() - oldest_ms) / 1e3)
        self._metrics.webhooks.saw(pending, age_s, await self._webhooks.counts())
        if any(survey.outbox or survey.due for survey in surveys):
            await asyncio.to_thread(self._queue.deliver_webhooks)
