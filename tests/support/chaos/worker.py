"""A worker whose engine hangs for ever once it is sent SIGUSR1: `python -m tests.support.chaos.worker`."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from engine.request import EngineProtocol, StepOutput
from shared.settings import WorkerSettings
from worker.engines import build_engine
from worker.main import run


class HangingEngine:
    """Any engine, whose next step never ends once `hang` is set."""

    def __init__(self, engine: EngineProtocol, hang: threading.Event) -> None:
        self._engine, self._hang = engine, hang

    def step(self) -> list[StepOutput]:
        """A step, or none."""
        if self._hang.is_set():
            threading.Event().wait()
        return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def main() -> int:
    """Run it; answers the exit code."""
    hang = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hang.set())

    def build(settings: WorkerSettings) -> EngineProtocol:
        return HangingEngine(build_engine(settings), hang)  # type: ignore[return-value]

    return run(build=build)


if __name__ == "__main__":
    sys.exit(main())
