"""How many threads compute, by what this process's threads had to wait for a CPU: on made-up times and real ones."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap

import pytest

from engine.cpu_share import MOST_REST, REST, WINDOW, CpuShare, ThreadTimes, counts_waiting, thread_times


class Machine:
    """As many CPUs as threads, shared fairly with others, and a clock."""

    def __init__(self, cpus: int) -> None:
        self.cpus, self.others, self.now = cpus, 0.0, 100.0
        self.ran, self.waited = [0.0] * cpus, [0.0] * cpus

    def compute(self, threads: int, seconds: float) -> None:
        """So many threads, without a pause."""
        runnable = threads + self.others
        part = min(1.0, self.cpus / runnable)
        for thread in range(threads):
            self.ran[thread] += seconds * part
            self.waited[thread] += seconds * (1 - part)
        self.now += seconds

    def times(self) -> ThreadTimes:
        return {
            thread: (int(ran * 1e9), int(waited * 1e9))
            for thread, (ran, waited) in enumerate(zip(self.ran, self.waited, strict=True))
        }

    def passes(self, share: CpuShare, seconds: float, each: float = 0.01) -> list[int]:
        """Threads of each pass."""
        end, taken = self.now + seconds, []
        while self.now < end:
            taken.append(share.threads())
            self.compute(taken[-1], each)
        return taken


def _on(cpus: int) -> tuple[Machine, CpuShare]:
    machine = Machine(cpus)
    return machine, CpuShare(cpus, machine.times, lambda: machine.now)


@pytest.mark.parametrize("cpus", [2, 3, 8, 64])
def test_alone_all_threads_compute(cpus: int) -> None:
    machine, share = _on(cpus)
    assert set(machine.passes(share, 5)) == {cpus}


@pytest.mark.parametrize(
    ("cpus", "others", "left"),
    [(2, 0.2, 2), (2, 0.5, 1), (2, 1, 1), (2, 7, 1), (8, 0.3, 8), (8, 1, 7), (8, 2, 6), (8, 5, 3), (8, 30, 1)],
)
def test_others_have_as_many_threads_less_as_they_take_cpus(cpus: int, others: float, left: int) -> None:
    machine, share = _on(cpus)
    machine.others = others
    assert machine.passes(share, 3 * WINDOW)[-1] == left


def test_all_threads_are_tried_again_for_a_small_part_of_the_time() -> None:
    machine, share = _on(2)
    machine.others = 1
    taken = machine.passes(share, 20)
    assert 0.01 < taken.count(2) / len(taken) < 0.1
    assert taken.count(1) + taken.count(2) == len(taken)


def test_when_others_leave_all_threads_are_back_after_the_rest() -> None:
    machine, share = _on(2)
    machine.others = 1
    machine.passes(share, 2)
    machine.others = 0
    back = machine.passes(share, (REST + 2) * 2 * WINDOW).index(2) * 0.01
    assert back <= REST * 2 * WINDOW
    assert set(machine.passes(share, 5)) == {2}


def test_a_long_pass_beside_others_is_not_tried_again_at_once_nor_never() -> None:
    machine, share = _on(2)
    machine.others = 1
    taken = machine.passes(share, 60, each=0.7)
    assert 1 / 20 < taken.count(2) / len(taken) < 1 / 4
    assert taken.count(2) >= 60 / (MOST_REST + 2) - 2


def test_others_that_come_while_some_threads_rest_take_more() -> None:
    machine, share = _on(8)
    machine.others = 1
    assert machine.passes(share, 3 * WINDOW)[-1] == 7
    machine.others = 4
    assert min(machine.passes(share, 4 * WINDOW)) <= 5


def test_an_idle_process_is_not_judged() -> None:
    machine, share = _on(2)
    machine.others = 5
    for _ in range(50):
        assert share.threads() == 2
        machine.compute(1, WINDOW / 500)
        machine.now += 10


def test_threads_that_begin_and_end_are_counted_while_they_last() -> None:
    machine, share = _on(2)
    machine.compute(2, 1)
    whole = machine.times()
    known = iter([{0: whole[0]}, whole | {7: (10**9, 0)}, {0: whole[0]}])
    share = CpuShare(2, lambda: next(known), lambda: machine.now)
    for _ in range(2):
        machine.now += 2 * WINDOW
        assert share.threads() == 2


def test_that_others_compute_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    machine, share = _on(2)
    machine.others = 1
    with caplog.at_level(logging.INFO, "engine.cpu_share"):
        machine.passes(share, 20)
    assert [record.getMessage() for record in caplog.records] == [
        "others compute on these CPUs: torch takes 1 of 2 threads meanwhile"
    ]


def test_where_nothing_is_counted_there_are_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(folder: str) -> list[str]:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(os, "listdir", none)
    assert thread_times() == {}
    assert not counts_waiting()
    monkeypatch.setattr(os, "listdir", lambda folder: ["999999999"])  # a thread that has ended
    assert thread_times() == {}


_REAL = """
import os, subprocess, sys, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import engine, torch
from engine.cpu_share import CpuShare
from engine.waiting import stays_awake
from kernels.cpu.threads import sharing
assert stays_awake()
torch.set_num_threads(2)
share, a = CpuShare(2), torch.randn(300, 300)

def within(seconds, wanted, part):
    # Whether so many threads compute in more than a part of the passes of some second.
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        taken, second = [], time.monotonic() + 1
        while time.monotonic() < second:
            with sharing(share.threads()):
                taken.append(torch.get_num_threads())
                for _ in range(20):
                    a @ a
        if taken.count(wanted) > part * len(taken):
            return True
    return False

busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    print(within(60, 1, 0.7))
finally:
    busy.kill()
    busy.wait()
# In most passes, if nothing else computes here; who knows?
print(within(60, 2, 0), torch.get_num_threads())
"""


def test_beside_a_busy_process_one_of_two_threads_computes_and_both_are_tried_again() -> None:
    if not counts_waiting() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("waiting is not counted here, or there is one CPU")
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in names}
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_REAL)], env=env, capture_output=True, text=True, check=True, timeout=180
    )
    assert answer.stdout.split() == ["True", "True", "2"]
