"""The engine's own thread: takes jobs in, steps, hands what comes out to the publisher."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import structlog

from engine.request import PRIORITIES, DeviceLostError, EngineProtocol, EngineStats, ModelInfo, RequestUsage, StepOutput
from shared.errors import EngineError, JobExpiredError, RopewayError
from shared.protocol import ErrorInfo, JobStatus
from worker.clock import RedisClock
from worker.holdings import Admission, Holdings
from worker.job import Admit, Cause, Drop, End, Handover, HeldJob, Keep, Progress, Stage
from worker.metrics import WorkerMetrics
from worker.publisher import Message, Publisher
from worker.pulse import EXIT_BROKEN, Fatal, Pulse, WatchedThread

_log = structlog.stdlib.get_logger("worker.loop")

#: Steps in a row that may raise; with the next one the process ends.
_MAX_STEP_FAILURES = 1
#: Seconds between two updates of the metrics from the engine.
_STATS_INTERVAL = 0.5


class _Nudge:
    """Wakes the thread so that it looks around."""


class _Close:
    """Ends the thread."""


class EngineLoop(WatchedThread):
    """Drives the engine. Every call of the engine is made here, also its making.

    Attributes:
        built: the model, once the engine exists; or the exception that its making raised.
        pulse: beats with each step.
        stats: the engine's last snapshot.
    """

    def __init__(
        self,
        build: Callable[[], EngineProtocol],
        holdings: Holdings,
        metrics: WorkerMetrics,
        clock: RedisClock,
        fatal: Fatal,
    ) -> None:
        super().__init__("engine", fatal)
        self.built: Future[ModelInfo] = Future()
        self.pulse = Pulse()
        self._build, self._metrics, self._clock = build, metrics, clock
        # Looked at when asked for: jobs leave the worker in other threads, also when this one has nothing to do.
        metrics.held.set_function(lambda: len(holdings))
        self._inbox: queue.SimpleQueue[Admit | End | Keep | _Nudge | _Close] = queue.SimpleQueue()
        self._jobs: dict[str, HeldJob] = {}
        self._failures = 0
        self._closing = False
        self.stats = EngineStats()
        self._stats_at = 0.0
        self._next_deadline = float("inf")
        self._publisher: Publisher
        self._admission: Admission
        self._on_room: Callable[[], None]
        self._engine: EngineProtocol

    # Other threads

    def attach(self, publisher: Publisher, admission: Admission, on_room: Callable[[], None]) -> None:
        """Connect what the thread talks to, before the first job. `on_room` is called when there may be room again."""
        self._publisher, self._admission, self._on_room = publisher, admission, on_room
        self.nudge()

    def admit(self, job: HeldJob) -> None:
        """Give a pulled job to the engine."""
        self._inbox.put(Admit(job))

    def end(self, job: HeldJob, cause: Cause) -> None:
        """Stop a job. Once it is over this does nothing."""
        self._inbox.put(End(job, cause))

    def keep_adapters(self, pinned: Mapping[str, str], retired: frozenset[str]) -> None:
        """See `EngineProtocol.keep_adapters`."""
        self._inbox.put(Keep(pinned, retired))

    def nudge(self) -> None:
        """Let the thread look again whether it may step."""
        self._inbox.put(_Nudge())

    def close(self, timeout: float) -> None:
        """End the thread after what is in its inbox."""
        self._inbox.put(_Close())
        self.join(timeout)

    @property
    def running(self) -> int:
        """Jobs in the engine."""
        return len(self._jobs)

    # The thread

    def main(self) -> None:
        """Make the engine, then take in and step until closed."""
        self.built.set_running_or_notify_cancel()
        try:
            self._engine = self._build()
            info = self._engine.info()
        except Exception as error:  # noqa: BLE001 - whatever it was, the caller of `built` decides what becomes of the process
            self.built.set_exception(error)
            return
        self.built.set_result(info)
        self._inbox.get()  # the nudge of `attach`
        self._refresh([])
        while not self._closing:
            self._receive()
            # Without jobs there may be adapters to read ahead.
            if self._engine.has_work() and not self._publisher.full:
                self._step()
        self._publisher.put([Handover(job) for job in self._jobs.values()])
        self._engine.close()
        self.pulse.busy = False  # the drain goes on, for as long as Redis takes

    def _receive(self) -> None:
        """Handle all messages; wait for one where there is nothing to compute."""
        arrived: list[HeldJob] = []
        changed = False
        must_wait = not self._engine.has_work() or self._publisher.full
        if must_wait:
            self._rest()
        while True:
            try:
                message = self._inbox.get(block=must_wait)
            except queue.Empty:
                break
            must_wait, self.pulse.busy = False, True
            if isinstance(message, Admit):
                arrived.append(message.job)
                self._admit(message.job)
            elif isinstance(message, End):
                self._end(message.job, message.cause)
            elif isinstance(message, Keep):
                self._engine.keep_adapters(message.pinned, message.retired)
            elif isinstance(message, _Close):
                self._closing = True
            changed = True
        if changed:
            self.pulse.beats += 1
            self._refresh(arrived)

    def _rest(self) -> None:
        """Before the thread waits: nothing runs, so every block must be free; or Redis is away and all is kept."""
        if not self._jobs:
            self._engine.check()
        self._snapshot(time.monotonic())
        self.pulse.busy = False

    def _admit(self, job: HeldJob) -> None:
        former = self._jobs.get(job.id)
        if former is not None:  # taken again before its fencing was noticed
            self._abort(former)
            self._publisher.put([Drop(former)])
        if job.cause is Cause.FENCED:
            job.stage = Stage.OVER
            self._publisher.put([Drop(job)])
        elif job.cause is Cause.RELEASED:
            job.stage = Stage.OVER
            self._publisher.put([Handover(job)])
        elif job.failure is not None:
            self._fail(job, job.failure)
        elif job.transcript.complete:
            self._finish(job, self._remainder(job), "cancelled" if job.transcript.aborted else "completed")
        else:
            self._add(job)

    def _add(self, job: HeldJob) -> None:
        try:
            self._engine.add(job.request())
        except RopewayError as error:
            self._fail(job, error)
            return
        except Exception:  # noqa: BLE001 - a fault of the engine in one request: the others go on
            _log.exception("engine refused a job with an exception", **job.named)
            self._fail(job, EngineError("the engine failed on this request"))
            return
        job.stage = Stage.RUNNING
        self._jobs[job.id] = job
        self._next_deadline = min(self._next_deadline, job.deadline_ms)
        if job.cause is not None:
            self._end(job, job.cause)

    def _end(self, job: HeldJob, cause: Cause) -> None:
        """Stop a job for a cause from outside."""
        if job.stage is Stage.TAKEN and (job.cause is None or cause is Cause.FENCED):
            job.cause = cause  # its admission is still to come
            return
        if self._jobs.get(job.id) is not job:
            return
        output = self._abort(job)
        if cause is Cause.FENCED:
            self._publisher.put([Drop(job)])
        elif cause is Cause.RELEASED:
            self._publisher.put([Handover(job)])
        elif cause is Cause.EXPIRED:
            output.choices = []
            self._finish(job, output, "expired", JobExpiredError("the job's deadline has passed"))
        else:
            self._finish(job, output, "cancelled")

    def _abort(self, job: HeldJob) -> StepOutput:
        """Take a job out of the engine."""
        self._jobs.pop(job.id, None)
        job.stage = Stage.OVER
        output = None
        try:
            output = self._engine.abort(job.id)
        except Exception:  # noqa: BLE001 - the job is over all the same; what is broken shows in the engine's own check
            _log.exception("abort failed", **job.named)
        return output if output is not None else self._remainder(job)

    def _step(self) -> None:
        if self._clock.now_ms() >= self._next_deadline:
            self._expire()
            if not self._engine.has_work():
                return
        began = time.monotonic()
        try:
            outputs = self._engine.step()
        except DeviceLostError:
            raise  # the process ends; its jobs are taken up elsewhere, and the attempt is charged
        except Exception:  # noqa: BLE001 - the engine isolates a request's fault; what still escapes took the whole step with it
            self._step_failed()
            return
        ended = time.monotonic()
        self._failures = 0
        self.pulse.beats += 1
        self._publisher.put(self._progress(outputs, began, ended))
        self._refresh([])
        if any(output.finished for output in outputs):
            self._on_room()
        if ended - self._stats_at > _STATS_INTERVAL:
            self._snapshot(ended)

    def _progress(self, outputs: list[StepOutput], began: float, ended: float) -> list[Message]:
        messages: list[Message] = []
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            message = Progress(job, output, began, ended)
            if output.finished:
                del self._jobs[job.id]
                job.stage = Stage.OVER
                message.status = "completed" if output.error is None else "failed"
                message.error = ErrorInfo.of(output.error) if output.error is not None else None
            messages.append(message)
        return messages

    def _step_failed(self) -> None:
        self._failures += 1
        self._metrics.step_failures.inc()
        _log.exception("engine step failed", jobs=len(self._jobs), failures=self._failures)
        if self._failures > _MAX_STEP_FAILURES:
            self._closing = True
            self._fatal(EXIT_BROKEN, "the engine fails again and again")
            return
        for job in list(self._jobs.values()):
            output = self._abort(job)
            output.choices = []
            self._finish(job, output, "failed", EngineError("the engine failed in a step that this request was in"))
        self._refresh([])
        self._on_room()

    def _expire(self) -> None:
        now = self._clock.now_ms()
        for job in [job for job in self._jobs.values() if job.deadline_ms <= now]:
            self._end(job, Cause.EXPIRED)
        self._next_deadline = min((job.deadline_ms for job in self._jobs.values()), default=float("inf"))
        self._refresh([])
        self._on_room()

    def _fail(self, job: HeldJob, error: RopewayError) -> None:
        self._finish(job, self._remainder(job), "failed", error)

    def _finish(self, job: HeldJob, output: StepOutput, status: JobStatus, error: RopewayError | None = None) -> None:
        """Have the last frame published."""
        job.stage = Stage.OVER
        output.finished = True
        now = time.monotonic()
        info = ErrorInfo.of(error) if error is not None else None
        self._publisher.put([Progress(job, output, now, now, status, info)])

    @staticmethod
    def _remainder(job: HeldJob) -> StepOutput:
        """An end without the engine: what earlier frames said is all there is."""
        usage = RequestUsage(len(job.envelope.prompt_token_ids), job.transcript.completion_tokens)
        return StepOutput(job.id, finished=True, usage=usage)

    def _snapshot(self, now: float) -> None:
        self._stats_at = now
        self.stats = self._engine.stats()
        self._metrics.engine(self.stats)

    def _refresh(self, arrived: list[HeldJob]) -> None:
        """Let intake know what can be admitted now."""
        capacity = {name: self._engine.capacity(priority) for name, priority in PRIORITIES.items()}
        self._admission.update(capacity, arrived)
