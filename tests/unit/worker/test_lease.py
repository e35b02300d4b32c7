"""Renewal, and who is found to have stalled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
import redis

from shared.jobs import Owned, Publication
from tests.unit.worker.parts import held
from worker import pulse as pulse_module
from worker.holdings import Holdings
from worker.job import Cause, HeldJob, Stage
from worker.lease import LeaseKeeper
from worker.metrics import WorkerMetrics
from worker.pulse import EXIT_STALLED, Pulse, StallDetector


class Store:
    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[list[Owned]] = []
        self.news = threading.Condition()

    def renew(self, owner: str, jobs: Sequence[Owned]) -> list[Publication]:
        with self.news:
            self.asked.append(list(jobs))
            self.news.notify_all()
        answer = self.answers.pop(0) if self.answers else Publication.FINE
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(jobs)  # type: ignore[list-item]

    def wait(self, count: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: len(self.asked) >= count, 20)


class Setup:
    def __init__(self, *answers: object, step_timeout_s: float = 60.0) -> None:
        self.store, self.holdings = Store(*answers), Holdings()
        self.engine, self.publisher = Pulse(), Pulse()
        self.ends: list[tuple[HeldJob, Cause]] = []
        self.codes: list[int] = []
        self.died = threading.Event()
        self.keeper = LeaseKeeper(
            self.store, "me", self.holdings, WorkerMetrics("m"), self._fatal,
            on_end=lambda job, cause: self.ends.append((job, cause)),
            engine=self.engine, publisher=self.publisher, lease_s=0.06, step_timeout_s=step_timeout_s,
        )  # fmt: skip

    def _fatal(self, code: int, reason: str) -> None:
        self.codes.append(code)
        self.died.set()


def test_renews_what_is_held_and_passes_answers_on() -> None:
    setup = Setup(Publication.FINE, Publication.CANCELLED, redis.TimeoutError("slow"), Publication.FENCED)
    job = held()
    setup.holdings.add(job)
    setup.keeper.start()
    setup.store.wait(5)
    setup.keeper.close(5)
    assert setup.store.asked[0] == [job.owned]
    assert setup.ends == [(job, Cause.CANCELLED), (job, Cause.FENCED)] and setup.codes == []


def test_a_job_that_has_just_ended_is_not_called_lost() -> None:
    setup = Setup(Publication.FENCED)
    job = held()
    job.stage = Stage.OVER
    setup.holdings.add(job)
    setup.keeper.start()
    setup.store.wait(2)
    setup.keeper.close(5)
    assert setup.ends == []


@pytest.mark.parametrize("who", ["engine", "publisher"])
def test_a_busy_thread_without_a_beat_ends_the_process(who: str) -> None:
    setup = Setup(step_timeout_s=0.2)
    setup.holdings.add(held())
    getattr(setup, who).busy = True
    setup.keeper.start()
    assert setup.died.wait(20) and setup.codes == [EXIT_STALLED]
    assert setup.keeper.stalled_s > 0.2
    setup.keeper.close(5)


def test_while_redis_is_away_the_publisher_has_not_stalled() -> None:
    setup = Setup(*[redis.ConnectionError("away")] * 40, step_timeout_s=0.2)
    setup.holdings.add(held())
    setup.publisher.busy = True
    setup.keeper.start()
    setup.store.wait(35)
    assert setup.codes == []
    assert setup.died.wait(20), "Redis answers again and the publisher still does not move"
    setup.keeper.close(5)


def test_a_pause_of_the_process_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pulse_module.time, "monotonic", lambda: now[0])
    pulse = Pulse(busy=True)
    detector = StallDetector(pulse, longest_gap=2.0)
    now[0] += 1.0
    assert detector.look() == 1.0
    now[0] += 3600.0
    assert detector.look() == 3.0
    pulse.beats += 1
    now[0] += 1.0
    assert detector.look() == 0.0
    pulse.busy = False
    now[0] += 1.0
    assert detector.look() == 0.0
    pulse.busy = True
    now[0] += 1.0
    assert detector.look() == 1.0 and detector.look(count=False) == 0.0


def test_a_slow_renewal_does_not_put_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a node away each lasts a while, and jobs on the others have no longer leases for that."""
    setup = Setup()
    setup.holdings.add(held())
    now, starts = [100.0], []
    setup.keeper.looked_at = now[0]

    class Closed:
        def wait(self, timeout: float) -> bool:
            now[0] += timeout
            return len(starts) == 6

    def renew(owner: str, jobs: Sequence[Owned]) -> list[Publication]:
        starts.append(now[0])
        now[0] += 0.015 if len(starts) != 3 else 0.05
        return [Publication.FINE]

    monkeypatch.setattr("worker.lease.time.monotonic", lambda: now[0])
    monkeypatch.setattr(setup.keeper, "_closed", Closed())
    monkeypatch.setattr(setup.store, "renew", renew)
    setup.keeper.main()
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps == pytest.approx([0.02, 0.02, 0.05, 0.02, 0.02])  # every third of the lease, or as soon as can be
