"""How many threads a pass of torch's kernels takes, by who else computes on this process's CPUs. Imports no torch."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Nanoseconds that a thread has run, and has been ready to run without a CPU, since it began.
ThreadTimes = dict[int, tuple[int, int]]

#: Seconds of each thread's time that a judgement rests on. To read the times takes some 0.1 ms.
WINDOW = 0.05
#: CPUs' worth of others that are borne. Measured with two threads on two CPUs beside a process that computes a part of
#: the time: up to a quarter two threads were faster than one, with a half slower, with all of it 0.55 times as fast.
BORNE = 0.35
#: Fewer threads are kept for so many times as long as it took to see that they are better, and so many seconds at most.
REST, MOST_REST = 16, 5.0


def thread_times() -> ThreadTimes:
    """Of the threads of this process, as Linux counts them (`/proc/<pid>/schedstat`); empty where it does not."""
    times: ThreadTimes = {}
    folder = "/proc/self/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return times
    for thread in threads:
        try:
            with open(f"{folder}/{thread}/schedstat", "rb", buffering=0) as file:
                ran, waited = file.read().split()[:2]
            times[int(thread)] = int(ran), int(waited)
        except (OSError, ValueError):  # it has ended meanwhile, or the kernel does not count
            continue
    return times


def counts_waiting() -> bool:
    """Whether `thread_times` says anything here."""
    return any(ran > 0 for ran, _ in thread_times().values())


class CpuShare:
    """Chooses the number of threads from how long this process's threads had to wait for a CPU.

    A region of many threads ends with its last one. Where another process has the CPU of one of them, all wait for it,
    and those that spin take CPUs from it besides; one thread that the system can move is faster then. All threads are
    tried again after a rest.
    """

    def __init__(
        self,
        threads: int,
        times: Callable[[], ThreadTimes] = thread_times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with all threads.

        Args:
            threads: the most.
            times: what the threads of this process have run and waited so far.
            clock: in seconds.
        """
        self._all = self._count = threads
        self._times, self._clock = times, clock
        self._rested = self._look = clock()
        self._seen = times()
        self._said = False

    def threads(self) -> int:
        """For the pass that begins now, at least 1."""
        now = self._clock()
        if now < self._look:
            return self._count
        if self._count < self._all and now >= self._rested:
            self._count = self._all
            self._seen, self._look = self._times(), now + WINDOW
        else:
            self._judge(now)
        return self._count

    def _judge(self, now: float) -> None:
        """The window that ends now, unless threads have slept for most of it."""
        seen = self._times()
        ran, waited = _between(self._seen, seen)
        lasted = (ran + waited) / self._count
        if lasted < WINDOW:
            self._look = now + WINDOW
            return
        self._seen, self._look = seen, now + WINDOW
        spare = _others(ran, waited, self._count) - BORNE
        if spare <= 0 or self._count == 1:
            return
        self._count = max(1, self._count - math.ceil(spare))
        self._rested = now + min(REST * lasted, MOST_REST)
        if not self._said:
            logger.info("others compute on these CPUs: torch takes %d of %d threads meanwhile", self._count, self._all)
            self._said = True
        if self._count == 1:  # which has nobody to wait for
            self._look = self._rested


def _between(seen: ThreadTimes, now: ThreadTimes) -> tuple[float, float]:
    """Seconds that the threads of now have run and waited since then."""
    ran = waited = 0
    for thread, (thread_ran, thread_waited) in now.items():
        ran_before, waited_before = seen.get(thread, (0, 0))
        ran += thread_ran - ran_before
        waited += thread_waited - waited_before
    return ran / 1e9, waited / 1e9


def _others(ran: float, waited: float, threads: int) -> float:
    """CPUs' worth of other work, where as many CPUs as threads are shared fairly.

    With `k` others each thread has `threads / (threads + k)` of a CPU, and waits for the rest of the time.
    """
    return threads * waited / max(ran, 1e-9)
