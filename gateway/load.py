"""How loaded each pool is and how fast it drains: soft limits and Retry-After come from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from gateway.catalogue import Catalogue
from shared.errors import RopewayError
from shared.jobs import LaneLoad
from shared.jobstore import JobStore
from shared.keys import CLASSES

log = structlog.get_logger(__name__)

#: Seconds between two looks, which is also how stale a sum may be.
LOOK_S: Final = 1.0
#: Weight of the newest look in the drain rate: about ten looks count.
_NEWEST: Final = 0.2
#: The same for how long jobs run: about fifty looks at a pool that has work; idle ones do not count.
_NEWEST_RUN: Final = 0.02
#: Tokens per second; a slower rate is that of a pool that was idle, and says nothing of how it drains.
_LEAST_DRAIN: Final = 1.0
#: Bounds of Retry-After in seconds; the first also where nothing is known of the rate.
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0


@dataclass(slots=True)
class PoolLoad:
    """A pool's counters, summed over its lanes, the tokens of jobs that end per second, and how long jobs run.

    Attributes:
        run_s: seconds that a job runs, weighted by its tokens: what runs over what ends (Little's law), as it was the
            last time that there was work; 0 where nothing is known.
    """

    load: LaneLoad = field(default_factory=LaneLoad)
    classes: Mapping[str, LaneLoad] = field(default_factory=lambda: dict.fromkeys(CLASSES, LaneLoad()))
    drain: float = 0.0
    paused: bool = False
    seen_at: float = 0.0
    _ran: float = 0.0
    _ended: float = 0.0

    @property
    def run_s(self) -> float:
        return self._ran / self._ended if self._ended > 0 else 0.0

    def look(self, load: LaneLoad, now: float, classes: Mapping[str, LaneLoad] | None = None) -> None:
        """Take new counters over; without those of the classes, nothing is queued or running."""
        self.classes = classes or dict.fromkeys(CLASSES, LaneLoad())
        ended = load.ended_tokens - self.load.ended_tokens
        # Counters of a lane vanish when it has been empty for long: then nothing is known of what ended.
        if self.seen_at and ended >= 0:
            seconds = max(now - self.seen_at, 1e-3)
            self.drain += _NEWEST * (ended / seconds - self.drain)
            running = (self.load.running_tokens + load.running_tokens) / 2
            if running or ended:
                self._ran += _NEWEST_RUN * (running * seconds - self._ran)
                self._ended += _NEWEST_RUN * (ended - self._ended)
        self.load, self.seen_at = load, now

    def retry_after(self) -> float:
        """Seconds until a good part of what is queued now will have gone."""
        if self.drain <= 0:
            return RETRY_MIN_S
        # Room for one more comes soon; but all that are refused now come back at the same time.
        seconds = 0.1 * (self.load.queued_tokens + self.load.running_tokens) / self.drain
        return min(max(seconds, RETRY_MIN_S), RETRY_MAX_S)

    def wait_s(self, job_class: str, own_tokens: int = 0) -> float | None:
        """About how long a job of a class waits that is queued now: tokens queued before it, by the rate at which jobs
        end; None where nothing is known of that. `own_tokens` are the job's, if it is among what is queued."""
        ahead = sum(self.classes[c].queued_tokens for c in CLASSES[: CLASSES.index(job_class) + 1]) - own_tokens
        if not self.seen_at or self.paused:
            return None
        if ahead <= 0:
            return 0.0
        return ahead / self.drain if self.drain >= _LEAST_DRAIN else None


class PoolLoads:
    """Looks at all pools of the catalogue again and again."""

    def __init__(self, store: JobStore, catalogue: Catalogue) -> None:
        self._store, self._catalogue = store, catalogue
        self._loads: dict[str, PoolLoad] = {}

    def of(self, pool: str) -> PoolLoad:
        """As it was at the last look; empty before the first."""
        return self._loads.get(pool) or PoolLoad()

    async def run(self) -> None:
        """Look until cancelled. Redis being away is no error: the next look tries again."""
        while True:
            await asyncio.sleep(LOOK_S)
            for pool in self._catalogue.pools:
                try:
                    await self.look(pool.card.pool, pool.card.lanes)
                except RopewayError as error:
                    log.warning("load.unknown", pool=pool.card.pool, error=error.message)
                except Exception:  # without this task soft limits would hold what was seen last for ever
                    log.exception("load.failed", pool=pool.card.pool)

    async def look(self, pool: str, lanes: int) -> None:
        """One look at one pool. Raises ServiceUnavailableError where Redis is away."""
        load = await self._store.pool_load(pool, lanes)
        busy = load.queued_jobs + load.running_jobs > 0
        classes = await self._store.class_loads(pool, lanes) if busy else None
        paused = await self._store.paused(pool)
        state = self._loads.setdefault(pool, PoolLoad())
        state.look(load, time.monotonic(), classes)
        state.paused = paused
