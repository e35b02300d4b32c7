"""The publisher against a store that fails in every way: nothing is lost, doubled or sent after fencing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.request import LogprobEntry
from shared.errors import ForeignDataError, ProtocolError
from shared.jobs import Publication
from tests.unit.worker.parts import FakeStore, away, delta, held, progress
from worker.holdings import Holdings
from worker.job import Cause, Handover, HeldJob, Progress
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox
from worker.publisher import Publisher


class Setup:
    def __init__(self, max_backlog: int = 10**6) -> None:
        self.store, self.holdings = FakeStore(), Holdings()
        self.ends: list[tuple[HeldJob, Cause]] = []
        self.ended, self.room = threading.Event(), threading.Event()
        self.fatal: list[str] = []
        self.metrics = WorkerMetrics("m")
        self.publisher = Publisher(
            self.store, "me", self.holdings, self.metrics, lambda _, reason: self.fatal.append(reason),
            on_end=self.end, room=self.room.set, max_backlog=max_backlog,
        )  # fmt: skip
        self.publisher.start()

    def end(self, job: HeldJob, cause: Cause) -> None:
        self.ends.append((job, cause))
        self.ended.set()

    def job(self, **fields: object) -> HeldJob:
        job = held(**fields)  # type: ignore[arg-type]
        self.holdings.add(job)
        return job

    def ids(self, job: HeldJob) -> list[int]:
        return [i for frame in self.store.frames.get(job.id, []) for c in frame.choices for i in c.ids]


@pytest.fixture
def setup() -> Iterator[Setup]:
    s = Setup()
    yield s
    s.publisher.close(5)
    assert s.fatal == []


def test_one_pipeline_for_all_jobs_and_coalescing_while_it_is_under_way(setup: Setup) -> None:
    gate = threading.Event()
    setup.store.script = [lambda _: gate.wait(20) and None]
    first, second = setup.job(), setup.job()
    setup.publisher.put([progress(first, delta(0, 0, 0))])
    setup.store.wait_calls(1)
    for n in range(1, 50):
        setup.publisher.put([progress(first, delta(0, n, n)), progress(second, delta(0, n - 1, n))])
    gate.set()
    setup.store.wait_calls(2)
    assert setup.publisher.close(5)
    assert setup.ids(first) == list(range(50)) and setup.ids(second) == list(range(1, 50))
    assert len(setup.store.calls) == 2 and len(setup.store.calls[1]) == 2
    assert [len(item.frames) for item in setup.store.calls[1]] == [1, 1]


def test_redis_away_then_an_answer_lost_loses_and_doubles_nothing(setup: Setup) -> None:
    job = setup.job()

    def accepted_but_unanswered(items):  # type: ignore[no-untyped-def]
        setup.store.script.insert(0, lambda _: None)
        setup.store.publish(items)
        away(items)

    setup.store.script = [away, away, accepted_but_unanswered, away]
    setup.publisher.put([progress(job, delta(0, 0, 0, text="a"), started=True)])
    setup.publisher.put([progress(job, delta(0, n, n, text="b")) for n in range(1, 20)])
    setup.publisher.put([progress(job, delta(0, 20, 20, finish="length"), status="completed")])
    assert setup.publisher.close(20)
    assert setup.ids(job) == list(range(21)) and setup.store.endings == {job.id: "completed"}
    assert len(setup.holdings) == 0
    assert setup.metrics.registry.get_sample_value("ropeway_publish_errors_total", {"model_name": "m"}) == 4


def test_frames_whose_node_is_away_hold_nobody_up(setup: Setup) -> None:
    gone, other = setup.job(), setup.job()

    def half(items):  # type: ignore[no-untyped-def]
        rest = [item for item in items if item.job_id != gone.id]
        saved, setup.store.script = setup.store.script, []
        setup.store.publish(rest)
        setup.store.script = saved
        return [Publication.AWAY if item.job_id == gone.id else Publication.FINE for item in items]

    setup.store.script = [half] * 6
    for n in range(3):
        setup.publisher.put([progress(gone, delta(0, n, n)), progress(other, delta(0, n, n))])
    setup.publisher.put([progress(other, delta(0, 3, 3), status="completed")])
    setup.store.wait_calls(4)
    assert setup.ids(other) == [0, 1, 2, 3] and gone.id not in setup.store.frames
    setup.publisher.put([Handover(gone)])
    assert setup.publisher.close(20)
    assert setup.ids(gone) == [0, 1, 2] and setup.store.released == [gone.id]


def test_a_pipeline_of_nothing_but_a_dead_nodes_frames_holds_nobody_up(setup: Setup) -> None:
    gone, other = setup.job(), setup.job()
    dead = threading.Event()
    publish = setup.store.publish

    def one_node_away(items):  # type: ignore[no-untyped-def]
        if dead.is_set():
            return publish(items)
        rest = [item for item in items if item.job_id != gone.id]
        answers = iter(publish(rest) if rest else [])
        return [Publication.AWAY if item.job_id == gone.id else next(answers) for item in items]

    setup.store.publish = one_node_away  # type: ignore[method-assign]
    setup.publisher.put([progress(gone, delta(0, 0, 0))])
    for n in range(1500):  # more than a number can be doubled
        setup.publisher._put_off([Outbox(gone, put_offs=n)])
    setup.publisher.put([progress(other, delta(0, 0, 0), status="completed")])
    setup.store.wait_calls(1)
    assert setup.ids(other) == [0] and gone.id not in setup.store.frames
    dead.set()
    assert setup.publisher.close(20)
    assert setup.ids(gone) == [0]


def test_a_job_that_cannot_be_handed_back_holds_nobody_up(setup: Setup) -> None:
    first, second = setup.job(), setup.job()
    setup.store.release_away = 3
    setup.publisher.put([Handover(first), Handover(second)])
    assert setup.publisher.close(20)
    assert sorted(setup.store.released) == sorted([first.id, second.id]) and len(setup.holdings) == 0


def test_after_fencing_nothing_is_sent(setup: Setup) -> None:
    job, other = setup.job(), setup.job()
    setup.store.script = [lambda items: [Publication.FENCED] * len(items)]
    setup.publisher.put([progress(job, delta(0, 0, 0))])
    assert setup.ended.wait(20) and setup.ends == [(job, Cause.FENCED)]
    setup.publisher.put([progress(job, delta(0, 1, 1), status="completed"), progress(other, delta(0, 0, 5))])
    assert setup.publisher.close(5)
    assert job.id not in setup.store.frames and setup.ids(other) == [5]
    assert not setup.holdings.holds(job)


def test_a_cancel_is_told_once_and_its_end_is_published(setup: Setup) -> None:
    job = setup.job()

    def cancelled(items):  # type: ignore[no-untyped-def]
        saved, setup.store.script = setup.store.script, []
        setup.store.publish(items)
        setup.store.script = saved
        return [Publication.CANCELLED] * len(items)

    setup.store.script = [cancelled, cancelled, cancelled]
    for n in range(3):
        before = len(setup.store.calls)
        setup.publisher.put([progress(job, delta(0, n, n))])
        setup.store.wait_calls(before + 1)
    setup.publisher.put([progress(job, delta(0, 3, finish="abort"), status="cancelled")])
    assert setup.publisher.close(5)
    assert setup.ends == [(job, Cause.CANCELLED)] and setup.store.endings == {job.id: "cancelled"}


def test_handover_sends_first_and_releases_then(setup: Setup) -> None:
    job, ended = setup.job(flush_ms=60_000), setup.job(flush_ms=60_000)
    setup.publisher.put([progress(job, delta(0, 0, 4)), progress(ended, delta(0, 0, 5), status="completed")])
    setup.publisher.put([Handover(job), Handover(ended)])
    assert setup.publisher.close(5)
    assert setup.ids(job) == [4] and setup.store.released == [job.id], "a job that has ended is not given back"
    assert len(setup.holdings) == 0


def test_flush_ms_gathers_and_the_end_does_not_wait_for_it(setup: Setup) -> None:
    job, quick = setup.job(flush_ms=60_000), setup.job()
    setup.publisher.put([progress(job, delta(0, n, n)) for n in range(5)])
    setup.publisher.put([progress(quick, delta(0, 0, 1))])
    setup.store.wait_calls(1)
    assert [item.job_id for item in setup.store.calls[0]] == [quick.id]
    setup.publisher.put([progress(job, delta(0, 5, 5), status="completed")])
    setup.store.wait_calls(2)
    assert setup.publisher.close(5)
    assert [len(frame.choices[0].ids) for frame in setup.store.frames[job.id] if frame.choices] == [6]


def large(job: HeldJob, count: int, **fields: Any) -> Progress:
    """About `count` times 20 KB of log probabilities of the prompt."""
    top = [(token, -1.0, token, bytes(900)) for token in range(20)]
    return progress(job, prompt=[LogprobEntry(token, -1.0, 1, b"x", top) for token in range(count)], **fields)


def test_much_at_once_goes_in_pipelines_of_bounded_size_and_in_turn(setup: Setup) -> None:
    gate = threading.Event()
    setup.store.script = [lambda _: gate.wait(20) and None]
    first = setup.job()
    setup.publisher.put([progress(first, delta(0, 0, 0))])
    setup.store.wait_calls(1)
    jobs = [setup.job(prompt=1001, prompt_logprobs=20) for _ in range(8)]
    for job in jobs:
        setup.publisher.put([large(job, 300)])
        setup.publisher.put([progress(job, delta(0, 0, 7, finish="length"), status="completed")])
    small = setup.job()
    setup.publisher.put([progress(small, delta(0, 0, 0, finish="length"), status="completed")])
    released = setup.job(prompt=1001, prompt_logprobs=20)
    setup.publisher.put([large(released, 200), Handover(released)])
    gate.set()
    assert setup.publisher.close(20)
    sizes = [sum(len(data) for item in call for data in item.frames) for call in setup.store.calls]
    assert max(sizes) < 6 * 2**20 and sum(sizes) > 40 * 2**20
    assert all(setup.ids(job) == [7] for job in jobs)
    assert setup.store.endings == dict.fromkeys([job.id for job in (*jobs, small)], "completed")
    assert sum(len(frame.prompt_logprobs) for frame in setup.store.frames[released.id]) == 200
    assert setup.store.released == [released.id], "once all of it was sent"
    turn = next(n for n, call in enumerate(setup.store.calls) if any(item.job_id == small.id for item in call))
    assert turn < 5, "a small one does not wait until the large ones are through"
    assert setup.metrics.registry.get_sample_value("ropeway_publish_backlog_bytes", {"model_name": "m"}) == 0


def test_a_full_backlog_is_told_and_so_is_room() -> None:
    setup = Setup(max_backlog=2000)
    gate = threading.Event()

    def closed(items):  # type: ignore[no-untyped-def]
        assert gate.wait(20)
        away(items)

    setup.store.script = [closed]
    job = setup.job()
    for n in range(30):
        setup.publisher.put([progress(job, delta(0, n, n))])
    assert setup.publisher.full and not setup.room.is_set()
    gate.set()
    assert setup.room.wait(20) and not setup.publisher.full
    setup.publisher.close(5)
    assert setup.ids(job) == list(range(30)) and setup.publisher._backlog == 0


def test_frames_that_redis_forgot_send_the_job_back_and_spare_the_others(setup: Setup) -> None:
    lost, good = setup.job(), setup.job()

    def gap(items):  # type: ignore[no-untyped-def]
        if any(item.job_id == lost.id for item in items):
            raise ProtocolError("a gap")

    setup.store.script = [gap, gap, gap]
    setup.publisher.put([progress(lost, delta(0, 0, 1)), progress(good, delta(0, 0, 2))])
    assert setup.ended.wait(20) and setup.ends == [(lost, Cause.FENCED)]
    assert setup.store.released == [lost.id]
    setup.publisher.close(5)
    assert setup.ids(good) == [2]


@pytest.mark.parametrize("too_broken", [False, True])
def test_a_job_whose_data_is_broken_is_buried_and_the_others_go_on(setup: Setup, too_broken: bool) -> None:
    broken, good = setup.job(), setup.job()
    setup.store.too_broken = too_broken

    def answer(items):  # type: ignore[no-untyped-def]
        rest = [item for item in items if item.job_id != broken.id]
        setup.store.publish(rest)
        return [Publication.BROKEN if item.job_id == broken.id else Publication.FINE for item in items]

    gate = threading.Event()
    setup.store.script = [lambda _: gate.wait(20) and None, answer]
    setup.publisher.put([progress(good, delta(0, 0, 1))])
    setup.store.wait_calls(1)
    setup.publisher.put([progress(broken, delta(0, 0, 1)), progress(good, delta(0, 1, 2))])
    gate.set()
    assert setup.ended.wait(20) and setup.ends == [(broken, Cause.FENCED)]
    setup.publisher.put([progress(broken, delta(0, 1, 5)), progress(good, delta(0, 2, 3))])
    assert setup.publisher.close(5)
    assert setup.store.buried == [broken.id] and setup.store.released == []
    letters = setup.metrics.registry.get_sample_value("ropeway_dead_letters_total", {"model_name": "m"})
    assert letters == (0 if too_broken else 1)
    assert setup.ids(good) == [1, 2, 3] and not setup.holdings.holds(broken) and setup.publisher._backlog == 0


def test_a_job_that_cannot_be_handed_back_does_not_end_the_thread(setup: Setup, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def refuse(owner: str, job: object) -> bool:
        raise ForeignDataError("m")

    monkeypatch.setattr(setup.store, "release", refuse)
    job, other = setup.job(), setup.job()
    setup.publisher.put([Handover(job), progress(other, delta(0, 0, 1))])
    assert setup.publisher.close(5)
    assert setup.ids(other) == [1] and not setup.holdings.holds(job)


def test_giving_up_leaves_jobs_to_their_leases() -> None:
    setup = Setup()
    setup.store.script = [away] * 1000
    job = setup.job()
    setup.publisher.put([progress(job, delta(0, 0, 1)), Handover(job)])
    assert not setup.publisher.close(0.2)
    assert not setup.publisher.is_alive() and setup.holdings.holds(job)
