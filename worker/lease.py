"""Keeps what this worker holds: renews leases in a thread and on a connection of its own, while the others move.

A worker whose engine hangs, or whose frames are not accepted while Redis answers, stops renewing and ends: its jobs
move to others one lease later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from shared.jobs import Owned, Publication
from worker.holdings import Holdings
from worker.job import Cause, HeldJob, Stage
from worker.metrics import WorkerMetrics
from worker.publisher import REDIS_TROUBLE
from worker.pulse import EXIT_STALLED, Fatal, Pulse, StallDetector, WatchedThread

_log = structlog.stdlib.get_logger("worker.lease")


class RenewStore(Protocol):
    """The part of the job store that the lease keeper uses."""

    def renew(self, owner: str, jobs: Sequence[Owned]) -> list[Publication]: ...


class LeaseKeeper(WatchedThread):
    """Renews every third of a lease; watches the other threads' pulses.

    Args:
        on_end: called with a job that was lost or cancelled.
        lease_s: seconds that a job may go unseen.
        step_timeout_s: a busy thread without a beat for longer than this has stalled.
    """

    def __init__(
        self,
        store: RenewStore,
        owner: str,
        holdings: Holdings,
        metrics: WorkerMetrics,
        fatal: Fatal,
        *,
        on_end: Callable[[HeldJob, Cause], None],
        engine: Pulse,
        publisher: Pulse,
        lease_s: float,
        step_timeout_s: float,
    ) -> None:
        super().__init__("lease", fatal)
        self._store, self._owner, self._holdings, self._metrics, self._on_end = store, owner, holdings, metrics, on_end
        self._renew_every, self._step_timeout = lease_s / 3, step_timeout_s
        self._tick = min(self._renew_every, step_timeout_s / 4)
        self._engine = StallDetector(engine, 2 * self._tick)
        self._publisher = StallDetector(publisher, 2 * self._tick)
        self._redis_answers = True
        self._closed = threading.Event()
        self.looked_at = time.monotonic()

    def close(self, timeout: float) -> None:
        """End the thread."""
        self._closed.set()
        self.join(timeout)

    @property
    def stalled_s(self) -> float:
        """For how long the engine or the publisher has not moved though it has work."""
        return max(self._engine.stalled_s, self._publisher.stalled_s)

    def main(self) -> None:
        """Look, renew, wait."""
        renewed_at, warned = 0.0, False
        # From look to look: a renewal may last for a second where one node is away, and the others' leases do not wait.
        while not self._closed.wait(max(0.0, self.looked_at + self._tick - time.monotonic())):
            self.looked_at = time.monotonic()
            # While Redis is away nothing can be published, and that is no fault of the publisher.
            self._publisher.look(count=self._redis_answers)
            if max(self._engine.look(), self._publisher.stalled_s) > self._step_timeout:
                if warned:
                    self._fatal(EXIT_STALLED, "engine or publisher has stalled")
                    return
                # One look earlier than the end: probes see it, and nothing is renewed any more.
                _log.error("engine or publisher does not move", stalled_s=self.stalled_s)
                warned = True
                continue
            warned = False
            if self.looked_at - renewed_at >= self._renew_every - self._tick / 2:
                self._renew()
                renewed_at = self.looked_at

    def _renew(self) -> None:
        jobs = self._holdings.all()
        if not jobs:
            self._redis_answers = True
            return
        try:
            answers = self._store.renew(self._owner, [job.owned for job in jobs])
        except REDIS_TROUBLE as error:
            self._metrics.redis_errors.inc()
            if self._redis_answers:
                _log.warning("cannot renew leases", jobs=len(jobs), error=repr(error))
            self._redis_answers = False
            return
        self._redis_answers = True
        for job, answer in zip(jobs, answers, strict=True):
            # AWAY: as if this node's part of the renewal had failed; the next one comes in a third of a lease.
            lost = answer in (Publication.FENCED, Publication.BROKEN)
            if lost and self._holdings.holds(job) and job.stage is not Stage.OVER:
                _log.warning("lease lost", epoch=job.epoch, **job.named)
                self._on_end(job, Cause.FENCED)
            elif answer is Publication.CANCELLED:
                self._on_end(job, Cause.CANCELLED)
