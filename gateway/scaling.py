"""How many workers a pool needs: what an autoscaler is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from shared.jobs import LaneLoad

#: Least figure while there is any job, so that no rounding on an autoscaler's way makes it nothing.
LEAST: Final = 0.01


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What one worker takes at once: jobs, and tokens of its KV cache (0: not known, not counted)."""

    jobs: float
    tokens: float = 0.0

    def share(self, jobs: int, tokens: int) -> float:
        """How many workers have room for these jobs, which may need so many tokens."""
        return max(jobs / self.jobs, tokens / self.tokens if self.tokens > 0 else 0.0)


def needed_workers(load: LaneLoad, drain: float, capacity: WorkerCapacity, target_s: float) -> float:
    """Full workers that a pool has work for; not rounded.

    What runs counts with the room it takes. What is queued counts likewise, so that everything has a place at once; or,
    if that is less, with the workers that start all of it within `target_s` at the rate at which workers end jobs now.

    Args:
        drain: tokens of jobs that end per second, over all workers; 0: not known.
    """
    if load.queued_jobs + load.running_jobs <= 0:
        return 0.0
    running = capacity.share(load.running_jobs, load.running_tokens)
    queued = capacity.share(load.queued_jobs, load.queued_tokens)
    if drain > 0 and running > 0:
        queued = min(queued, load.queued_tokens / (target_s * drain / running))
    return max(running + queued, LEAST)


def replicas(needed: float) -> int:
    """Whole workers."""
    return math.ceil(round(needed, 6))
