"""How many workers a pool asks for."""

from __future__ import annotations

import pytest

from gateway.scaling import LEAST, WorkerCapacity, needed_workers, replicas
from shared.jobs import LaneLoad

WORKER = WorkerCapacity(jobs=10, tokens=10_000)


def need(load: LaneLoad, drain: float = 0.0, target_s: float = 10.0, capacity: WorkerCapacity = WORKER) -> float:
    return needed_workers(load, drain, capacity, target_s)


def test_nothing_needs_nobody_and_one_job_needs_somebody() -> None:
    assert need(LaneLoad()) == 0.0
    assert replicas(0.0) == 0
    tiny = need(LaneLoad(queued_jobs=1, queued_tokens=1), capacity=WorkerCapacity(jobs=100_000))
    assert tiny == LEAST
    assert replicas(tiny) == 1


def test_an_empty_queue_with_busy_workers_still_needs_them() -> None:
    assert need(LaneLoad(running_jobs=40, running_tokens=4_000)) == 4.0


def test_tokens_count_where_they_are_scarcer_than_places() -> None:
    assert need(LaneLoad(queued_jobs=5, queued_tokens=30_000)) == 3.0
    assert need(LaneLoad(queued_jobs=5, queued_tokens=30_000), capacity=WorkerCapacity(jobs=10)) == 0.5


def test_short_jobs_wait_for_places_that_come_free_in_time() -> None:
    # A full worker ends 1,000 tokens a second: 20,000 tokens take two of them ten seconds, one of them twenty.
    load = LaneLoad(queued_jobs=400, queued_tokens=20_000, running_jobs=10, running_tokens=500)
    assert need(load) == 41.0
    assert need(load, drain=1_000) == pytest.approx(3.0)
    assert need(load, drain=1_000, target_s=20) == pytest.approx(2.0)


def test_never_more_than_give_every_job_a_place() -> None:
    load = LaneLoad(queued_jobs=20, queued_tokens=20_000, running_jobs=10, running_tokens=10_000)
    assert need(load, drain=1.0) == 3.0
    assert replicas(3.0000000001) == 3
