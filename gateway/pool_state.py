"""A pool's load as an autoscaler, an operator and Prometheus see it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

import structlog

from gateway.catalogue import WORKER_TTL_MS, Catalogue, Pool
from gateway.load import PoolLoads
from gateway.scaling import LEAST, WorkerCapacity, needed_workers, replicas
from shared.jobs import LaneLoad
from shared.jobstore import JobStore
from shared.keys import CLASSES
from shared.protocol import WorkerInfo

log = structlog.get_logger(__name__)

#: Jobs that a worker takes at once where none has ever said so: the default of `max_num_seqs`.
DEFAULT_JOBS: Final = 64
_NOTHING: Final = LaneLoad()


@dataclass(frozen=True, slots=True)
class PoolState:
    """One look at a pool.

    Attributes:
        known: whether a worker has ever said what the pool serves; without that nobody can submit to it.
        load: over all classes.
        drain: tokens of jobs that end per second.
        run_s: seconds that a job runs, see `gateway.load`.
        workers: that live, by state: `ready`, `draining`, and how many of the ready ones are `busy`.
        needed: workers that there is work for, see `gateway.scaling`.
        target_s: that `needed` was made for.
    """

    pool: str
    known: bool
    paused: bool
    load: LaneLoad
    classes: Mapping[str, LaneLoad]
    drain: float
    run_s: float
    workers: Mapping[str, int]
    needed: float
    target_s: float

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "object": "pool.load",
            "pool": self.pool,
            "known": self.known,
            "paused": self.paused,
            **_counters(self.load),
            "classes": {name: _counters(load) for name, load in self.classes.items()},
            "drain_tokens_per_s": round(self.drain, 3),
            "run_s": round(self.run_s, 3),
            "workers": dict(self.workers),
            "needed_workers": round(self.needed, 4),
            "suggested_replicas": replicas(self.needed),
            "target_s": self.target_s,
        }


def _counters(load: LaneLoad) -> dict[str, int]:
    return {
        "queued_jobs": load.queued_jobs,
        "queued_tokens": load.queued_tokens,
        "running_jobs": load.running_jobs,
        "running_tokens": load.running_tokens,
    }


@dataclass(slots=True)
class PoolStates:
    """Looks at pools when asked, and remembers what a worker of each takes at once."""

    store: JobStore
    catalogue: Catalogue
    loads: PoolLoads
    expected: Sequence[str]
    target_s: float
    _jobs: dict[str, float] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Pools that are known, or meant to be here."""
        return sorted({pool.card.pool for pool in self.catalogue.pools}.union(self.expected))

    async def look(self, name: str, *, target_s: float | None = None, jobs: float | None = None) -> PoolState:
        """A pool's state now, not as of the last second.

        A pool that no worker has served yet asks for one, which will say what it serves.

        Args:
            jobs: that a worker takes at once; None: what live workers say, or said last.

        Raises:
            ServiceUnavailableError: Redis is away. It is never taken for an empty queue.
            ForeignDataError: counters are no numbers.
        """
        pool = self.catalogue.known(name)
        if pool is None:
            await self.catalogue.refresh_after_miss()
            pool = self.catalogue.known(name)
        target_s = target_s or self.target_s
        if pool is None:
            log.warning("pool.unknown", pool=name)
            return unknown(name, target_s)
        load = await self.store.pool_load(name, pool.card.lanes)
        busy = load.queued_jobs + load.running_jobs > 0
        classes = await self.store.class_loads(name, pool.card.lanes) if busy else dict.fromkeys(CLASSES, _NOTHING)
        workers = await self.store.live_workers(name, WORKER_TTL_MS)
        paused = await self.store.paused(name)
        return self._state(pool, load, classes, workers, paused=paused, target_s=target_s, jobs=jobs)

    def last(self, name: str, fresh_s: float) -> PoolState | None:
        """As of the last look in the background; None if that is older than `fresh_s` seconds."""
        pool = self.catalogue.known(name)
        if pool is None:
            return unknown(name, self.target_s) if self.catalogue.refreshed_within(fresh_s) else None
        seen = self.loads.of(name)
        if not seen.seen_at or time.monotonic() - seen.seen_at > fresh_s:
            return None
        return self._state(
            pool, seen.load, seen.classes, pool.workers, paused=seen.paused, target_s=self.target_s, jobs=None
        )

    def _state(
        self,
        pool: Pool,
        load: LaneLoad,
        classes: Mapping[str, LaneLoad],
        workers: Sequence[WorkerInfo],
        *,
        paused: bool,
        target_s: float,
        jobs: float | None,
    ) -> PoolState:
        name = pool.card.pool
        ready = [worker for worker in workers if worker.state == "ready"]
        sizes = [worker.max_num_seqs for worker in ready if worker.max_num_seqs > 0]
        if sizes:
            self._jobs[name] = fmean(sizes)
        capacity = WorkerCapacity(jobs or self._jobs.get(name, DEFAULT_JOBS), float(pool.kv_tokens))
        seen = self.loads.of(name)
        # More workers would take nothing of a pool that is paused; those that finish what runs are still needed.
        counted = LaneLoad(0, 0, load.running_jobs, load.running_tokens) if paused else load
        return PoolState(
            pool=name,
            known=True,
            paused=paused,
            load=load,
            classes=classes,
            drain=seen.drain,
            run_s=seen.run_s,
            workers={
                "ready": len(ready),
                "busy": sum(worker.running + worker.waiting > 0 for worker in ready),
                "draining": sum(worker.state == "draining" for worker in workers),
            },
            needed=needed_workers(counted, seen.run_s, capacity, target_s),
            target_s=target_s,
        )


def unknown(name: str, target_s: float) -> PoolState:
    """The state of a pool that no worker has served yet."""
    return PoolState(
        pool=name,
        known=False,
        paused=False,
        load=_NOTHING,
        classes=dict.fromkeys(CLASSES, _NOTHING),
        drain=0.0,
        run_s=0.0,
        workers={"ready": 0, "busy": 0, "draining": 0},
        needed=LEAST,  # one, whatever share of a worker an autoscaler aims at
        target_s=target_s,
    )
