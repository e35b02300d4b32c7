"""The engine's thread: every way in and every way out of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.request import DeviceLostError, StepOutput
from engine.sim import SimConfig, SimEngine
from shared.errors import EngineError
from shared.protocol import ChoiceFrame
from tests.unit.worker.parts import held
from worker.clock import RedisClock
from worker.holdings import Admission, Holdings
from worker.job import Cause, Drop, Handover, HeldJob, Progress, Stage
from worker.loop import EngineLoop
from worker.metrics import WorkerMetrics
from worker.pulse import EXIT_BROKEN


class Sink:
    """Stands in for the publisher."""

    def __init__(self) -> None:
        self.full = False
        self.messages: list[object] = []
        self.news = threading.Condition()

    def put(self, messages: list[object]) -> None:
        with self.news:
            self.messages += messages
            self.news.notify_all()

    def wait(self, job: HeldJob, kind: type = Progress, *, finished: bool = True) -> Progress:
        def find() -> Progress | None:
            return next(
                (
                    m
                    for m in self.messages
                    if type(m) is kind
                    and m.job is job  # type: ignore[attr-defined]
                    and (kind is not Progress or m.output.finished or not finished)
                ),  # type: ignore[attr-defined]
                None,
            )  # type: ignore[return-value]

        with self.news:
            assert self.news.wait_for(lambda: find() is not None, 20)
            found = find()
        assert found is not None
        return found

    def tokens(self, job: HeldJob) -> int:
        return sum(
            len(d.token_ids)
            for m in self.messages
            if isinstance(m, Progress) and m.job is job
            for d in m.output.choices
        )


class Faulty(SimEngine):
    """Raises in `step` so many times, or says that its device is lost."""

    failures = 0
    broken = lost = False

    def step(self) -> list[StepOutput]:
        if self.lost:
            raise DeviceLostError("told to be")
        if self.failures > 0:
            self.failures -= 1
            raise ZeroDivisionError
        return super().step()

    def check(self) -> None:
        if self.broken:
            raise AssertionError("a block is missing")
        super().check()


class Setup:
    def __init__(self) -> None:
        self.engine = Faulty(SimConfig(step_ms=1, max_num_seqs=4))
        self.holdings, self.sink, self.clock = Holdings(), Sink(), RedisClock()
        self.admission = Admission(10**6)
        self.fatal: list[int] = []
        self.died = threading.Event()
        self.metrics = WorkerMetrics("m")
        self.loop = EngineLoop(lambda: self.engine, self.holdings, self.metrics, self.clock, self._fatal)
        self.loop.start()
        self.loop.built.result(20)
        self.room = threading.Event()
        self.loop.attach(self.sink, self.admission, self.room.set)  # type: ignore[arg-type]

    def _fatal(self, code: int, reason: str) -> None:
        self.fatal.append(code)
        self.died.set()

    def admit(self, job: HeldJob) -> HeldJob:
        self.holdings.add(job)
        self.admission.reserve(job)
        self.loop.admit(job)
        return job


@pytest.fixture
def setup() -> Iterator[Setup]:
    s = Setup()
    yield s
    s.loop.close(10)
    assert not s.loop.is_alive()


def test_a_job_runs_to_its_end_and_there_is_room_again(setup: Setup) -> None:
    job = setup.admit(held(n=2))
    message = setup.sink.wait(job)
    assert message.status == "completed" and job.stage is Stage.OVER
    assert setup.sink.tokens(job) == 16 and setup.room.wait(20)
    setup.loop.close(10)
    assert setup.admission.budget() is not None and not setup.engine.has_work()


def test_jobs_held_are_counted_as_they_are_now(setup: Setup) -> None:
    def shown() -> float | None:
        return setup.metrics.registry.get_sample_value("ropeway_num_jobs_held", {"model_name": "m"})

    job = setup.admit(held())
    setup.sink.wait(job)
    setup.loop.close(10)
    assert shown() == 1, "until Redis has accepted its end"
    setup.holdings.remove(job)
    assert shown() == 0


@pytest.mark.parametrize(
    ("cause", "status", "kind"),
    [(Cause.CANCELLED, "cancelled", Progress), (Cause.FENCED, None, Drop), (Cause.RELEASED, None, Handover)],
)
@pytest.mark.parametrize("when", ["before", "running"])
def test_every_cause_ends_a_job_once(setup: Setup, cause: Cause, status: str | None, kind: type, when: str) -> None:
    job = held(max_tokens=4000)
    if when == "before":
        setup.loop.end(job, cause)
    setup.admit(job)
    if when == "running":
        setup.sink.wait(job, finished=False)
        setup.loop.end(job, cause)
    message = setup.sink.wait(job, kind)
    for _ in range(2):
        setup.loop.end(job, cause)
    setup.loop.close(10)
    ends = [m for m in setup.sink.messages if m.job is job and (not isinstance(m, Progress) or m.output.finished)]  # type: ignore[attr-defined]
    assert len(ends) == 1 and setup.engine.abort(job.id) is None
    if status:
        assert message.status == status and [d.finish_reason for d in message.output.choices] == ["abort"]


def test_a_job_past_its_deadline_ends_as_expired(setup: Setup) -> None:
    job = held(max_tokens=4000)
    job.deadline_ms = int(setup.clock.now_ms()) + 50
    message = setup.sink.wait(setup.admit(job))
    assert message.status == "expired" and message.error is not None and message.error.status == 504


def test_the_same_job_under_a_later_epoch_replaces_the_former(setup: Setup) -> None:
    former = setup.admit(held(max_tokens=4000))
    setup.sink.wait(former, finished=False)
    later = setup.admit(held(epoch=2, job_id=former.id))
    assert setup.sink.wait(later).status == "completed"
    setup.sink.wait(former, Drop)
    setup.loop.end(former, Cause.FENCED)
    assert former.stage is Stage.OVER


def test_a_complete_log_without_a_last_frame_is_ended_without_the_engine(setup: Setup) -> None:
    done, cut = held(last_seq=3), held(last_seq=3)
    for job, finish in ((done, "stop"), (cut, "abort")):
        job.transcript.add([ChoiceFrame(ids=[5, 6], text="x", finish=finish)])  # type: ignore[arg-type]
    message = setup.sink.wait(setup.admit(done))
    assert message.status == "completed" and message.output.usage.completion_tokens == 2
    assert setup.sink.wait(setup.admit(cut)).status == "cancelled"
    assert setup.engine.stats().steps == 0


def test_refused_and_unreadable_jobs_fail_with_their_errors(setup: Setup) -> None:
    refused, unreadable = held(), held(last_seq=4)
    refused.envelope.prompt_token_ids = []
    unreadable.failure = EngineError("cannot be read")
    first, second = setup.sink.wait(setup.admit(refused)), setup.sink.wait(setup.admit(unreadable))
    assert first.status == second.status == "failed"
    assert first.error is not None and first.error.param == "prompt"
    assert second.error is not None and second.error.message == "cannot be read"


def test_a_step_that_raises_fails_its_jobs_and_the_next_job_is_served(setup: Setup) -> None:
    setup.engine.failures = 1
    message = setup.sink.wait(setup.admit(held()))
    assert message.status == "failed" and message.error is not None and message.error.code == "engine_error"
    assert setup.sink.wait(setup.admit(held())).status == "completed" and setup.fatal == []


def test_a_step_that_raises_twice_ends_the_process(setup: Setup) -> None:
    setup.engine.failures = 2
    setup.sink.wait(setup.admit(held()))
    second = setup.admit(held())
    assert setup.died.wait(20) and setup.fatal == [EXIT_BROKEN]
    setup.loop.close(10)
    assert not any(isinstance(m, Progress) and m.job is second for m in setup.sink.messages)


def test_a_lost_device_ends_the_process_and_no_job(setup: Setup) -> None:
    setup.engine.lost = True
    job = setup.admit(held())
    assert setup.died.wait(20) and setup.fatal == [EXIT_BROKEN]
    setup.loop.close(10)
    assert not any(isinstance(m, Progress) and m.job is job for m in setup.sink.messages)


def test_a_broken_invariant_ends_the_process(setup: Setup) -> None:
    setup.engine.broken = True
    setup.admit(held())
    assert setup.died.wait(20) and setup.fatal == [EXIT_BROKEN]


def test_the_engine_rests_while_the_backlog_is_full(setup: Setup) -> None:
    setup.sink.full = True
    job = setup.admit(held())
    setup.loop.end(held(), Cause.CANCELLED)
    setup.loop.nudge()
    assert setup.sink.tokens(job) == 0
    setup.sink.full = False
    setup.loop.nudge()
    assert setup.sink.wait(job).status == "completed"


def test_an_idle_thread_is_not_busy(setup: Setup) -> None:
    setup.sink.wait(setup.admit(held()))
    setup.loop.close(10)
    assert setup.loop.pulse.beats > 0


def test_a_thread_that_has_ended_does_not_look_stalled(setup: Setup) -> None:
    setup.admit(held(max_tokens=10_000))
    setup.loop.close(10)
    assert not setup.loop.pulse.busy


def test_an_engine_that_cannot_be_made_is_reported() -> None:
    def build() -> SimEngine:
        raise ValueError("no such model")

    loop = EngineLoop(build, Holdings(), WorkerMetrics("m"), RedisClock(), lambda *_: None)
    loop.start()
    with pytest.raises(ValueError, match="no such model"):
        loop.built.result(20)
