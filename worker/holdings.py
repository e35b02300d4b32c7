"""What the worker holds and what it may still take. Shared by its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from engine.request import PRIORITIES, Capacity
from shared.jobs import PullBudget
from worker.job import HeldJob


class Holdings:
    """Jobs in this worker's hands, from the pull until the last frame is accepted, the job handed back or lost.

    Attributes:
        on_empty: called, from whichever thread it was, when the last one has gone.
    """

    def __init__(self, on_empty: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, HeldJob] = {}
        self.on_empty = on_empty
        self._empty = threading.Event()
        self._empty.set()

    def add(self, job: HeldJob) -> None:
        """Take a job in; it replaces an earlier taking of it."""
        with self._lock:
            self._jobs[job.id] = job
            self._empty.clear()

    def remove(self, job: HeldJob) -> None:
        """Let a job go; nothing happens if it is not held any more."""
        with self._lock:
            if self._jobs.get(job.id) is not job:
                return
            del self._jobs[job.id]
            if self._jobs:
                return
            self._empty.set()
        self.on_empty()

    def get(self, job_id: str) -> HeldJob | None:
        """The job, if it is held."""
        with self._lock:
            return self._jobs.get(job_id)

    def holds(self, job: HeldJob) -> bool:
        """Whether this very taking is held."""
        return self.get(job.id) is job

    def all(self) -> list[HeldJob]:
        """A snapshot."""
        with self._lock:
            return list(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    def wait_empty(self, timeout: float) -> bool:
        """Wait until nothing is held."""
        return self._empty.wait(timeout)


class Admission:
    """How much may be pulled: the engine's capacity less what is on its way to the engine.

    The engine's thread writes the capacity, intake reads it; both under one lock, so that no job is counted twice or
    not at all.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._lock = threading.Lock()
        self._capacity: Mapping[str, Capacity] = {name: Capacity(0, 0) for name in PRIORITIES}
        self._coming: dict[HeldJob, int] = {}
        self._kv_tokens = kv_tokens

    def reserve(self, job: HeldJob) -> None:
        """Count a job that was pulled and is not yet in the engine."""
        with self._lock:
            self._coming[job] = PRIORITIES[job.envelope.job_class]

    def update(self, capacity: Mapping[str, Capacity], arrived: list[HeldJob]) -> None:
        """The engine's capacity by class, now that `arrived` are in it (or are over)."""
        with self._lock:
            self._capacity = capacity
            for job in arrived:
                self._coming.pop(job, None)

    def budget(self) -> PullBudget | None:
        """What `pull` may take; None where no class has room for a sequence."""
        with self._lock:
            sequences, tokens = {}, {}
            for name, priority in PRIORITIES.items():
                ahead = [job.envelope for job, other in self._coming.items() if other <= priority]
                capacity = self._capacity[name]
                sequences[name] = max(0, capacity.sequences - sum(envelope.sequences for envelope in ahead))
                tokens[name] = max(0, capacity.tokens - sum(envelope.cost_tokens for envelope in ahead))
        if not any(sequences[name] and tokens[name] for name in PRIORITIES):
            return None
        return PullBudget(sequences, tokens, self._kv_tokens)
