"""How many workers a pool asks for."""

from __future__ import annotations

import pytest

from gateway.load import PoolLoad
from gateway.scaling import LEAST, WorkerCapacity, needed_workers, replicas
from shared.jobs import LaneLoad

WORKER = WorkerCapacity(jobs=10, tokens=10_000)


def need(load: LaneLoad, run_s: float = 0.0, target_s: float = 10.0, capacity: WorkerCapacity = WORKER) -> float:
    return needed_workers(load, run_s, capacity, target_s)


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
    load = LaneLoad(queued_jobs=400, queued_tokens=20_000, running_jobs=10, running_tokens=500)
    assert need(load) == 41.0
    # A place serves ten jobs of one second each in ten seconds.
    assert need(load, run_s=1) == pytest.approx(5.0)
    assert need(load, run_s=1, target_s=20) == pytest.approx(3.0)


def test_never_more_than_give_every_job_a_place() -> None:
    load = LaneLoad(queued_jobs=20, queued_tokens=20_000, running_jobs=10, running_tokens=10_000)
    assert need(load, run_s=10) == need(load, run_s=600) == 3.0
    assert replicas(3.0000000001) == 3


def test_how_long_jobs_run_is_learnt_from_what_runs_and_what_ends() -> None:
    state = PoolLoad()
    assert state.run_s == 0.0
    # Two jobs of 100 tokens run at any time; one ends every second: each runs for two.
    for second in range(1, 200):
        state.look(LaneLoad(running_jobs=2, running_tokens=200, ended_tokens=100 * second), float(second))
    assert state.run_s == pytest.approx(2.0, rel=0.05)
    known = state.run_s
    for second in range(201, 400):
        state.look(LaneLoad(ended_tokens=100 * 199), float(second))
    # What was learnt is not forgotten in an idle night; the rate at which jobs end is.
    assert state.run_s == pytest.approx(known, rel=0.05) and state.drain < 1e-6
