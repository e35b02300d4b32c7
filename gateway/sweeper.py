"""Looks after all pools now and then: jobs that nobody will end, jobs that no stream holds. One gateway at a time."""

from __future__ import annotations

import asyncio
import random
import uuid

import structlog

from gateway.metrics import GatewayMetrics
from shared import keys
from shared.errors import ForeignDataError, JobNotFoundError, ProtocolError, ServiceUnavailableError
from shared.protocol import Card
from shared.upkeep import Upkeep

log = structlog.get_logger(__name__)

#: Seconds that a running job may outlive its deadline. Its worker ends it within a step, if it lives.
SLACK_S = 30.0
#: A look for jobs that no stream holds walks the whole key space: one in so many sweeps.
RESTORE_EVERY = 20


class Sweeper:
    """Sweeps every pool about every `interval_s` seconds, whichever gateway comes first.

    Redis being away is no error: the next round tries again.
    """

    def __init__(self, upkeep: Upkeep, metrics: GatewayMetrics, interval_s: float) -> None:
        self._upkeep, self._metrics, self._interval_s = upkeep, metrics, interval_s
        self._owner = uuid.uuid4().hex
        self._rounds = 0

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            # Gateways that started together do not ask together.
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))
            try:
                await self.sweep()
            except ServiceUnavailableError as error:
                log.warning("sweep.redis_away", error=error.message)
            except Exception:  # without this task nobody ends what is late while no worker lives
                log.exception("sweep.failed")

    async def sweep(self) -> None:
        """One round over all pools.

        Raises:
            ServiceUnavailableError: Redis is away, or one of its nodes: what others have was swept.
        """
        restore = self._rounds % RESTORE_EVERY == 0
        self._rounds += 1
        away: ServiceUnavailableError | None = None
        for pool in await self._upkeep.pools():
            try:
                if await self._upkeep.lock_sweep(pool, self._owner, self._interval_s * 0.8):
                    await self._sweep_pool(pool, restore)
            except ServiceUnavailableError as error:
                away = error
        if away is not None:
            raise away

    async def _sweep_pool(self, pool: str, restore: bool) -> None:
        # Before the lanes, so that what is put back is counted there.
        if restore:
            try:
                await self._restore(pool)
            except ServiceUnavailableError as error:
                log.warning("sweep.restore_failed", pool=pool, error=error.message)
        card: Card | None
        try:
            card = await self._upkeep.get_card(pool)
        except ProtocolError:  # of another version, or broken: its jobs are to end all the same
            card = None
        away: ServiceUnavailableError | None = None
        for lane in range(card.lanes if card is not None else keys.MAX_LANES):
            try:
                await self._sweep_lane(pool, lane)
            except ServiceUnavailableError as error:  # of a cluster, the node of this lane may be the only one
                away = error
        if away is not None:
            raise away

    async def _sweep_lane(self, pool: str, lane: int) -> None:
        swept = await self._upkeep.sweep_lane(pool, lane, SLACK_S)
        for error in swept.broken:
            log.error("sweep.lane_broken", pool=pool, lane=lane, error=error.message)
        for job_id, status in swept.ended.items():
            self._metrics.swept.labels(status).inc()
            log.info("sweep.job_ended", job_id=job_id, status=status)
        if swept.forgotten:
            log.info("sweep.consumers_forgotten", pool=pool, lane=lane, consumers=swept.forgotten)
        if swept.recounted:
            log.warning("sweep.recounted", pool=pool, lane=lane)

    async def _restore(self, pool: str) -> None:
        async for job_id in self._upkeep.job_ids(pool):
            try:
                restored = await self._upkeep.restore(job_id)
            except (ForeignDataError, JobNotFoundError) as error:
                log.error("sweep.job_broken", job_id=job_id, error=error.message)
                continue
            if restored:
                self._metrics.swept.labels("restored").inc()
                log.warning("sweep.job_restored", job_id=job_id)
