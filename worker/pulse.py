"""Heartbeats of the worker's threads, and who looks at them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

_log = structlog.stdlib.get_logger("worker")

#: Exit codes of the process; 0 is a drain that succeeded.
EXIT_STALLED = 70
EXIT_BROKEN = 71
EXIT_REFUSED = 78

Fatal = Callable[[int, str], None]


def exit_now(code: int, reason: str) -> None:
    """End the process from any thread, at once: a thread that hangs cannot be joined."""
    _log.critical("worker exits", code=code, reason=reason)
    logging.shutdown()
    os._exit(code)


@dataclass(slots=True)
class Pulse:
    """A thread's beat. `beats` rises with each thing done; it need not rise while `busy` is False."""

    beats: int = 0
    busy: bool = False


class StallDetector:
    """For how long a busy pulse has not beaten, in seconds that the observer itself has seen pass.

    A process that was paused (SIGSTOP, a frozen container) has not stalled: of a long silence between two looks only
    `longest_gap` seconds count.
    """

    def __init__(self, pulse: Pulse, longest_gap: float) -> None:
        self._pulse, self._longest_gap = pulse, longest_gap
        self._beats, self._seen = pulse.beats, time.monotonic()
        self.stalled_s = 0.0

    def look(self, *, count: bool = True) -> float:
        """Seconds without a beat so far. With `count` False this look starts the count anew."""
        now, beats = time.monotonic(), self._pulse.beats
        if not count or not self._pulse.busy or beats != self._beats:
            self.stalled_s = 0.0
        else:
            self.stalled_s += min(now - self._seen, self._longest_gap)
        self._beats, self._seen = beats, now
        return self.stalled_s


class WatchedThread(threading.Thread):
    """A daemon thread that may not end by an exception: then the process ends, so that it is restarted."""

    def __init__(self, name: str, fatal: Fatal) -> None:
        super().__init__(name=name, daemon=True)
        self._fatal = fatal

    def main(self) -> None:
        """The thread's work."""
        raise NotImplementedError

    def run(self) -> None:
        """Run `main`."""
        try:
            self.main()
        except Exception:  # noqa: BLE001 - whatever it was, the thread is gone and the worker is of no use without it
            _log.exception("thread failed", thread=self.name)
            self._fatal(EXIT_BROKEN, f"thread {self.name} failed")
