"""A worker whose simulated engine misbehaves as `FAULT` says: `python -m tests.support.faulty_worker`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import worker.main
from engine.request import EngineProtocol, EngineRequest, StepOutput
from engine.sim import SimConfig, SimEngine
from shared.errors import EngineError
from shared.settings import WorkerSettings
from worker.main import run
from worker.registry import Registry

#: A prompt that begins with this token id sets the fault off.
TRIGGER = 7


class FaultyEngine(SimEngine):
    """Goes wrong for a request whose prompt begins with the trigger."""

    def __init__(self, config: SimConfig, fault: str) -> None:
        super().__init__(config)
        self._fault = fault
        self._triggers: set[str] = set()
        self._steps = 0

    def add(self, request: EngineRequest) -> None:
        if request.prompt_token_ids[0] == TRIGGER:
            if self._fault == "add":
                raise ZeroDivisionError("a fault in add")
            self._triggers.add(request.id)
        super().add(request)

    def abort(self, request_id: str) -> StepOutput | None:
        if self._fault != "raise always":
            self._triggers.discard(request_id)
        return super().abort(request_id)

    def step(self) -> list[StepOutput]:
        if not self._triggers:
            return super().step()
        self._steps += 1
        if self._steps <= 5:
            return super().step()
        if self._fault == "hang":
            threading.Event().wait()
        if self._fault in ("raise", "raise always"):
            raise ZeroDivisionError("a fault in step")
        request_id = self._triggers.pop()
        aborted = super().abort(request_id)
        assert aborted is not None
        failed = StepOutput(request_id, finished=True, usage=aborted.usage, error=EngineError("NaN logits"))
        return [failed, *super().step()]


class DeafRegistry(Registry):
    """Its task goes on after the first cancel, as when a library's time-out fires at the same moment."""

    async def run(self) -> None:
        try:
            await super().run()
        except asyncio.CancelledError:
            await super().run()


def build(settings: WorkerSettings) -> EngineProtocol:
    """The engine with its fault."""
    if os.environ["FAULT"] == "load":
        threading.Event().wait()
    if os.environ["FAULT"] == "lost cancel":
        worker.main.Registry = DeafRegistry  # type: ignore[misc]
    if os.environ["FAULT"] == "no model":
        raise FileNotFoundError("no such model")
    config = SimConfig(step_ms=settings.sim_step_ms, max_num_seqs=settings.max_num_seqs)
    return FaultyEngine(config, os.environ["FAULT"])


if __name__ == "__main__":
    sys.exit(run(build=build))
