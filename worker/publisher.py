"""Sends what the engine makes: one pipeline for all jobs, the next one as soon as the last is answered.

While a round trip is under way the engine goes on; what it makes meanwhile is gathered and goes with the next pipeline.
When Redis is away, frames are kept and sent again; above a bound in bytes the engine waits.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

import redis
import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from shared.errors import ForeignDataError, ProtocolError, ServiceUnavailableError
from shared.jobs import Owned, Publication, Publish
from worker.holdings import Holdings
from worker.job import Cause, Drop, Handover, HeldJob, Progress
from worker.job_traces import FENCED, RELEASED, JobTraces
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox, weight
from worker.pulse import Fatal, Pulse, WatchedThread

_log = structlog.stdlib.get_logger("worker.publisher")
_T = TypeVar("_T")

#: Bytes of frames in one pipeline, above which the jobs that are left wait for the next.
_PIPELINE_BYTES = 4 * 1024 * 1024

#: Of the longest pause before frames are sent again.
_MOST_DOUBLINGS = 6
#: Redis is away, loading, full, read-only or in trouble.
REDIS_TROUBLE = (redis.RedisError, OSError, ServiceUnavailableError)

Message = Progress | Handover | Drop


class PublishStore(Protocol):
    """The part of the job store that the publisher uses."""

    def publish(self, items: list[Publish]) -> list[Publication]: ...

    def release(self, owner: str, job: Owned) -> bool: ...

    def bury(self, owner: str, job: Owned, error: ProtocolError) -> bool: ...


class _Close:
    """Ends the thread."""


class Publisher(WatchedThread):
    """The publisher's thread.

    Args:
        on_end: called with a job that was fenced or cancelled, so that the engine ends it.
        room: called when there is room again after `full` was true.
        max_backlog: bytes that may wait for Redis before the engine pauses.
        traces: are told how each job left.
    """

    def __init__(
        self,
        store: PublishStore,
        owner: str,
        holdings: Holdings,
        metrics: WorkerMetrics,
        fatal: Fatal,
        *,
        on_end: Callable[[HeldJob, Cause], None],
        room: Callable[[], None],
        max_backlog: int = 64 * 1024 * 1024,
        traces: JobTraces | None = None,
    ) -> None:
        super().__init__("publisher", fatal)
        self.pulse = Pulse()
        self._store, self._owner, self._holdings, self._metrics = store, owner, holdings, metrics
        self._on_end, self._room, self._max_backlog = on_end, room, max_backlog
        self._traces = traces or JobTraces()
        self._inbox: queue.SimpleQueue[Message | _Close] = queue.SimpleQueue()
        self._outboxes: dict[HeldJob, Outbox] = {}
        self._lock = threading.Lock()
        self._backlog = 0
        self._full = False
        self._closing = False
        self._put_offs = 0
        self._give_up = threading.Event()

    # Other threads

    def put(self, messages: Iterable[Message]) -> None:
        """Take what a step has made; never waits."""
        for message in messages:
            if isinstance(message, Progress):
                message.weight = weight(message.output)
                self._account(message.weight)
            self._inbox.put(message)

    @property
    def full(self) -> bool:
        """Too much waits for Redis: the engine should pause until `room` is called."""
        return self._full

    def close(self, timeout: float) -> bool:
        """Send what is left and end; after `timeout` seconds give up. Answers whether everything was sent."""
        self._inbox.put(_Close())
        self.join(timeout)
        self._give_up.set()
        self.join(1.0)
        return all(box.due is None for box in self._outboxes.values())

    # The thread

    def main(self) -> None:
        """Receive, gather, send."""
        while not (self._closing and (not self._outboxes or self._give_up.is_set())):
            self._receive()
            now = time.monotonic()
            due = [box for box in self._outboxes.values() if box.due is not None and (box.due <= now or self._closing)]
            if due:
                self.pulse.busy = True
                self._send(sorted(due, key=lambda box: box.due or 0.0))
                self.pulse.busy = False
            elif self._closing:
                return

    def _receive(self) -> None:
        """Wait for a message or until gathered frames are due; take all that has come."""
        dues = [box.due for box in self._outboxes.values() if box.due is not None]
        wait = max(0.0, min(dues) - time.monotonic()) if dues else None
        try:
            message = self._inbox.get(block=wait != 0.0 and not self._closing, timeout=wait)
            while True:
                self._apply(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _apply(self, message: Message | _Close) -> None:
        if isinstance(message, _Close):
            self._closing = True
        elif isinstance(message, Drop):
            self._let_go(message.job, FENCED)
        elif not self._holdings.holds(message.job):  # fenced or replaced while this was on its way
            if isinstance(message, Progress):
                self._account(-message.weight)
        else:
            box = self._outboxes.get(message.job)
            if box is None:
                box = self._outboxes[message.job] = Outbox(message.job, interval=self._metrics.intervals.add)
            if isinstance(message, Handover):
                box.handover, box.due = True, 0.0
            else:
                box.add(message)

    def _send(self, boxes: list[Outbox]) -> None:
        """One pipeline; answers are passed on. What is too much for it stays due."""
        away: set[HeldJob] = set()
        items: list[tuple[Outbox, Publish]] = []
        size = 0
        for box in boxes:
            if size < _PIPELINE_BYTES and (item := box.take(self._owner)) is not None:
                items.append((box, item))
                size += sum(map(len, item.frames))
        if items:
            answers: list[Publication | None] | list[Publication] | None
            try:
                answers = self._retry(lambda: self._store.publish([item for _, item in items]))
            except ProtocolError:  # of one job, or more: find out which
                answers = [self._alone(item) for _, item in items]
            if answers is None:
                return
            for (box, _), answer in zip(items, answers, strict=True):
                self._answered(box, answer)
            away = {box.job for (box, _), answer in zip(items, answers, strict=True) if answer is Publication.AWAY}
            self._put_off([box for box, _ in items if box.job in away])
        for box in boxes:
            if box.handover and box.empty and box.job in self._outboxes and box.job not in away:
                self._hand_over(box)

    def _put_off(self, boxes: Collection[Outbox]) -> None:
        """What is due of jobs whose node is away is tried again later; the others do not wait for it."""
        if not boxes:
            self._put_offs = 0
            return
        self._put_offs += 1
        self._metrics.publish_errors.inc()
        if self._put_offs in (1, 10, 100):
            _log.warning("cannot reach the node of some jobs, trying again", attempt=self._put_offs, jobs=len(boxes))
        pauses = []
        for box in boxes:
            # Each job's own count: a round with the dead node holds the others up, so such rounds become rare.
            box.put_offs = min(box.put_offs + 1, _MOST_DOUBLINGS)
            pauses.append(random.uniform(0.0, min(2.0, 0.05 * 2**box.put_offs)))
            box.due = time.monotonic() + pauses[-1]
        if self._closing:
            self._pause(min(pauses))

    def _alone(self, item: Publish) -> Publication | None:
        """The answer to one job's frames alone; None if Redis has forgotten some that came before."""
        try:
            return self._store.publish([item])[0]
        except ProtocolError as error:
            _log.warning("frames were lost, the job goes back", job_id=item.job_id, error=error.message)
            return None
        except REDIS_TROUBLE:
            return Publication.AWAY

    def _answered(self, box: Outbox, answer: Publication | None) -> None:
        job = box.job
        if answer is None:
            # Redis came back without what it had accepted last (an AOF flushed each second). Whoever takes the job up
            # goes on from what is left in its log.
            self._hand_over(box)
            self._on_end(job, Cause.FENCED)
            return
        if answer is Publication.AWAY:
            return
        if answer is Publication.BROKEN:
            self._give_up_on(box)
            return
        if answer is Publication.FENCED:
            self._metrics.fenced.inc()
            _log.warning("fenced", epoch=job.epoch, **job.named)
            self._let_go(job, FENCED)
            self._on_end(job, Cause.FENCED)
            return
        self._account(-box.accepted())
        if box.ending is not None and box.empty:
            self._metrics.ended(box.ending.status, *box.summary, box.asked)
            self._let_go(job, box.ending.status)
        elif answer is Publication.CANCELLED and not box.told:
            box.told = True
            self._on_end(job, Cause.CANCELLED)

    def _give_up_on(self, box: Outbox) -> None:
        """End a job whose keys hold what cannot be read or written; the others must not wait for it."""
        job = box.job
        error = ForeignDataError("what Redis holds of the job is not what was written there")
        _log.error("a job's data is broken, it is given up", **job.named)
        try:
            if self._store.bury(self._owner, job.owned, error):
                self._metrics.dead_letters.inc()
        except REDIS_TROUBLE:
            self._put_off([box])
            return
        except ProtocolError as too_broken:
            _log.error("a job cannot even be buried", error=too_broken.message, **job.named)
        self._let_go(job, "failed")
        self._on_end(job, Cause.FENCED)

    def _hand_over(self, box: Outbox) -> None:
        try:
            released = self._store.release(self._owner, box.job.owned)
        except ProtocolError as error:
            _log.error("a job cannot be handed back", error=error.message, **box.job.named)
            released = False
        except REDIS_TROUBLE:
            self._put_off([box])
            return
        if released:
            self._metrics.released.inc()
            _log.info("handed back", **box.job.named)
        self._let_go(box.job, RELEASED if released else FENCED)

    def _let_go(self, job: HeldJob, outcome: str) -> None:
        """The job is no more this worker's; harmless to repeat."""
        box = self._outboxes.pop(job, None)
        if not job.over_at:
            job.over_at = time.monotonic()
            self._traces.over(job, outcome, box)
        if box is not None:
            self._account(-box.weight)
        self._holdings.remove(job)

    def _retry(self, call: Callable[[], _T]) -> _T | None:
        """Call until Redis answers; None if the publisher was told to give up."""
        retrying = Retrying(
            retry=retry_if_exception_type(REDIS_TROUBLE),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            stop=lambda _: self._give_up.is_set(),
            sleep=self._pause,
            before_sleep=self._failed,
            retry_error_callback=lambda _: None,
        )
        result: _T | None = retrying(call)
        self.pulse.beats += 1
        return result

    def _pause(self, seconds: float) -> None:
        self._give_up.wait(seconds)

    def _failed(self, state: RetryCallState) -> None:
        self._metrics.publish_errors.inc()
        if state.attempt_number in (1, 10, 100):
            error = state.outcome.exception() if state.outcome else None
            _log.warning("cannot publish, trying again", attempt=state.attempt_number, error=repr(error))

    def _account(self, change: int) -> None:
        """Count bytes that wait; tell when there is room again."""
        with self._lock:
            self._backlog += change
            had_room = not self._full
            self._full = self._backlog > (self._max_backlog if had_room else self._max_backlog // 2)
            freed = not had_room and not self._full
        self._metrics.backlog.set(self._backlog)
        if freed:
            self._room()
