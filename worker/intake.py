"""Takes jobs from the lanes: home lanes first, others a little later, never more than the engine can admit."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from shared import keys
from shared.errors import EngineError, ForeignDataError, ProtocolError
from shared.jobs import PullBudget, Pulled
from shared.jobstore import JobStore
from shared.tasks import cancel_all
from worker.holdings import Admission, Holdings
from worker.job import Cause, HeldJob
from worker.job_traces import JobTraces
from worker.loop import EngineLoop
from worker.metrics import WorkerMetrics
from worker.publisher import REDIS_TROUBLE
from worker.reclaim import ReclaimRule
from worker.resume import read_back

_log = structlog.stdlib.get_logger("worker.intake")

#: Jobs that two workers died with, of which this worker holds at most so many.
_SUSPECTS = 4
#: Seconds that a lane is left alone whose data is broken.
_REST_S = 5.0
#: Seconds before a lane is tried again that could not be pulled from: the first bound, doubled each time, and the last.
#: As with all back-off here it is a draw between nothing and the bound.
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class IntakeConfig:
    """Where to pull, and seconds.

    Attributes:
        max_adapters: most adapters whose jobs are held where there are other workers, but for jobs that nobody else
            takes; None: any number.
    """

    pool: str
    lanes: int
    owner: str
    home_poll_s: float
    all_poll_s: float
    steal_delay_s: float
    max_adapters: int | None = None


class Intake:
    """Pulls from an asyncio loop. `wake`, `poll_all` and `owners` are called in that loop, `room` from any thread."""

    def __init__(
        self,
        pull_store: JobStore,
        read_store: JobStore,
        config: IntakeConfig,
        rule: ReclaimRule,
        loop: EngineLoop,
        holdings: Holdings,
        admission: Admission,
        metrics: WorkerMetrics,
        traces: JobTraces | None = None,
    ) -> None:
        self._pull_store, self._read_store, self._config, self._rule = pull_store, read_store, config, rule
        self._loop, self._holdings, self._admission, self._metrics = loop, holdings, admission, metrics
        self._traces = traces or JobTraces()
        self._homes: frozenset[int] = frozenset(range(config.lanes))
        # No other worker is there to take what this one does not.
        self._alone = False
        self._hot: set[int] = set()
        self._blocked: set[int] = set()
        self._rests: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._room_count = 0
        self._turn = 0
        self._all_at = 0.0
        self._clearing: int | None = None
        self._paused = False
        # Nothing waits in a home lane, and nothing was heard of any lane since that was seen.
        self._empty = False
        self._event = asyncio.Event()
        self._stopping = asyncio.Event()
        self._resuming: set[asyncio.Task[None]] = set()
        self._asyncio = asyncio.get_running_loop()
        self.pulled_at = 0.0
        #: Whether each wake that was sent up to now has come: where nothing waited before, nothing can wait now.
        self.hears_all: Callable[[], bool] = lambda: False

    # Signals from outside

    def owners(self, owners: Sequence[str]) -> None:
        """The workers that live: this one's home lanes follow from them."""
        self._alone = len(owners) < 2
        if self._config.owner in owners:
            homes = frozenset(keys.home_lanes(self._config.owner, owners, self._config.lanes))
            self._empty, self._homes = self._empty and homes == self._homes, homes

    def wake(self, lane: int) -> None:
        """A lane has work: a home lane is looked at now, another one when its home has had the time to."""
        if lane in self._homes:
            self._heat([lane])
        elif 0 <= lane < self._config.lanes:
            self._asyncio.call_later(self._config.steal_delay_s, self._heat, [lane])

    def poll_all(self) -> None:
        """Look at every lane: a wake may have been lost."""
        self._all_at = 0.0
        self._event.set()

    def pause(self, paused: bool) -> None:
        """Take nothing while the pool is paused, not even what a dead worker left; what runs goes on."""
        if paused == self._paused:
            return
        self._paused = paused
        _log.info("pool paused" if paused else "pool goes on", pool=self._config.pool)
        self.poll_all()

    def room(self) -> None:
        """Something has left the engine or the worker. From any thread."""
        self._room_count += 1
        if (self._blocked or self._clearing is not None) and not self._stopping.is_set():
            self._asyncio.call_soon_threadsafe(self._unblock)

    def cancel(self, job_id: str) -> None:
        """Somebody asked for a job's end. It may be another worker's."""
        job = self._holdings.get(job_id)
        if job is not None:
            self._loop.end(job, Cause.CANCELLED)

    # The task

    async def run(self) -> None:
        """Pull until `stop`. A pull that is under way is finished, so that no job is taken and forgotten."""
        home_at = 0.0
        while not self._stopping.is_set():
            if self._paused:
                self._event.clear()
                await self._event.wait()
                continue
            if self._hot:
                await self._round()
                continue
            now = time.monotonic()
            if now >= min(home_at, self._all_at):
                everything = now >= self._all_at
                if everything:
                    self._all_at = now + self._config.all_poll_s
                home_at = now + self._config.home_poll_s
                if not everything and self._empty and self.hears_all():
                    continue
                lanes = range(self._config.lanes) if everything else sorted(self._homes)
                await self._poll(lanes, everything=everything)
                continue
            self._event.clear()
            await self._sleep(min(home_at, self._all_at) - now)

    async def stop(self) -> None:
        """Pull nothing more; jobs that were being read back go on to the engine's thread as they are."""
        self._stopping.set()
        self._event.set()
        await cancel_all([*self._resuming])

    async def _sleep(self, seconds: float) -> None:
        timer = self._asyncio.call_later(seconds, self._event.set)
        await self._event.wait()
        timer.cancel()

    def _heat(self, lanes: Sequence[int]) -> None:
        self._empty = False
        self._hot.update(lanes)
        self._event.set()

    def _unblock(self) -> None:
        self._hot |= self._blocked
        self._blocked.clear()
        if self._clearing is not None:
            self._hot.add(self._clearing)
        self._event.set()

    async def _poll(self, lanes: Sequence[int], *, everything: bool) -> None:
        """Find lanes with work by their counters, in one round trip.

        `everything`: also those with jobs to take back, and those with delayed ones, whose time may have come.
        """
        self._empty = True  # unless a wake comes meanwhile
        try:
            loads = await self._read_store.lane_loads(self._config.pool, lanes)
        except REDIS_TROUBLE:
            self._empty = False
            self._metrics.redis_errors.inc()
            return
        except ForeignDataError:  # of one lane: pulling finds out which
            self._empty = False
            self._metrics.redis_errors.inc()
            self._hot.update(lanes)
            return
        self._hot.update(
            lane
            for lane, load in zip(lanes, loads, strict=True)
            if load is not None
            and (load.queued_jobs > 0 or (everything and (load.running_jobs > 0 or load.delayed_jobs > 0)))
        )
        self._empty = self._empty and not any(
            load is None or load.queued_jobs > 0 for lane, load in zip(lanes, loads, strict=True) if lane in self._homes
        )

    async def _round(self) -> None:
        """One pull from each hot lane: home lanes first, each round another one at the front."""
        hot = sorted(self._hot, key=lambda lane: (lane not in self._homes, (lane - self._turn) % self._config.lanes))
        self._turn += 1
        if self._clearing in hot:
            hot.insert(0, hot.pop(hot.index(self._clearing)))
        for lane in hot:
            if self._stopping.is_set() or self._paused:
                return
            self._hot.discard(lane)
            if time.monotonic() < self._rests.get(lane, 0.0):
                continue
            before = self._room_count
            budget = self._budget()
            if budget is None:
                self._blocked.add(lane)
            else:
                await self._look(lane, budget)
            if self._blocked and before != self._room_count:
                self._unblock()

    async def _look(self, lane: int, budget: PullBudget) -> None:
        try:
            pulled = await self._pull(lane, budget)
        except ForeignDataError as error:
            # Somebody wrote into the lane's keys. That must not keep this worker from the other lanes.
            self._metrics.redis_errors.inc()
            _log.error("cannot pull from a lane, its data is broken", lane=lane, error=error.message)
            self._rests[lane] = time.monotonic() + _REST_S
            return
        except REDIS_TROUBLE as error:
            self._failed(lane, error)
            return
        self._failures.pop(lane, None)
        for job_id, status in pulled.ended.items():
            _log.info("job ended in the queue", job_id=job_id, status=status)
        self._take(pulled)
        if pulled.alone_waiting and not budget.idle and self._clearing is None and lane in self._homes:
            self._clearing = lane  # stop pulling until this worker is empty: it can then run alone
        elif lane == self._clearing and budget.idle:
            self._clearing = None
        if (pulled.jobs or not budget.idle) and await self._queued(lane) > 0:
            # What was left behind waits for room; where something came there may be some yet.
            (self._hot if pulled.jobs else self._blocked).add(lane)

    def _budget(self) -> PullBudget | None:
        """What may be pulled now; None to wait for room."""
        held = self._holdings.all()
        if any(job.alone for job in held) or (self._clearing is not None and held):
            return None
        budget = self._admission.budget()
        if budget is None:
            return None
        suspects = max(0, _SUSPECTS - sum(job.suspect for job in held))
        adapters = frozenset(filter(None, (job.envelope.adapter_identity for job in held)))
        most = None if self._alone else self._config.max_adapters
        more = None if most is None else max(0, most - len(adapters))
        return replace(budget, idle=not held, suspects=suspects, adapters=adapters, more_adapters=more)

    async def _pull(self, lane: int, budget: PullBudget) -> Pulled:
        node = await self._pull_store.node(self._config.pool, lane)
        try:
            lease = self._rule.lease(lane, node)
            pulled = await self._pull_store.pull(self._config.pool, lane, self._config.owner, budget, lease)
        except REDIS_TROUBLE:
            self._rule.failed(node)
            raise
        self.pulled_at = time.monotonic()
        try:
            self._rule.answered(lane, await self._pull_store.node(self._config.pool, lane), lease)
        except REDIS_TROUBLE:  # who has answered is not known; the jobs are here all the same
            self._rule.failed(node)
        return pulled

    async def _queued(self, lane: int) -> int:
        try:
            return (await self._read_store.lane_load(self._config.pool, lane)).queued_jobs
        except REDIS_TROUBLE:
            self._metrics.redis_errors.inc()
            return 1
        except ForeignDataError:  # the next pull says so
            return 0

    def _failed(self, lane: int, error: Exception) -> None:
        """Try a lane again after a pause: it may be its node alone that is away, so the others do not wait for it."""
        self._metrics.redis_errors.inc()
        failures = self._failures[lane] = self._failures.get(lane, 0) + 1
        if failures in (1, 10, 100):
            _log.warning("cannot pull, trying again", lane=lane, attempt=failures, error=repr(error))
        pause = random.uniform(0.0, min(_LONGEST_PAUSE_S, _PAUSE_S * 2**failures))
        self._asyncio.call_later(pause, self._heat, [lane])

    def _take(self, pulled: Pulled) -> None:
        self._metrics.pulled.inc(len(pulled.jobs))
        self._metrics.redeliveries.inc(pulled.reclaimed)
        self._metrics.dead_letters.inc(len(pulled.buried))
        for answer in pulled.jobs:
            job = HeldJob.of(answer)
            self._holdings.add(job)
            self._admission.reserve(job)
            self._traces.taken(job)
            _log.debug("pulled", epoch=job.epoch, attempts=job.attempts, last_seq=job.last_seq, **job.named)
            if job.last_seq == 0:
                self._loop.admit(job)
            else:
                task = self._asyncio.create_task(self._resume(job))
                self._resuming.add(task)
                task.add_done_callback(self._resuming.discard)

    async def _resume(self, job: HeldJob) -> None:
        """Read a job's log, then give it to the engine. Whatever happens, the engine's thread gets the job."""
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(REDIS_TROUBLE), wait=wait_random_exponential(multiplier=0.05, max=2.0)
            ):
                with attempt:
                    await read_back(self._read_store, job)
            self._metrics.resumed.inc()
            _log.info("taken up", epoch=job.epoch, last_seq=job.last_seq, **job.named)
        except ProtocolError as error:
            _log.error("a job's log does not read", error=error.message, **job.named)
            job.failure = EngineError("what was published of this job cannot be read, so it cannot go on")
        except Exception:  # noqa: BLE001 - unforeseen, and without its log the job must not begin anew
            _log.exception("a job's log could not be read", **job.named)
            job.failure = EngineError("what was published of this job cannot be read, so it cannot go on")
        except asyncio.CancelledError:  # by `stop`: hand the job back untouched
            job.cause = Cause.RELEASED
        finally:
            self._loop.admit(job)
