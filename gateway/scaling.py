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


def needed_workers(load: LaneLoad, run_s: float, capacity: WorkerCapacity, target_s: float) -> float:
    """Full workers that a pool has work for; not rounded.

    What runs counts with the room it takes. What is queued counts likewise, so that everything has a place at once; but
    where jobs run for less than `target_s` a place serves several in that time, and so fewer workers are enough.

    Args:
        run_s: seconds that a job runs; 0: not known.
    """
    if load.queued_jobs + load.running_jobs <= 0:
        return 0.0
    running = capacity.share(load.running_jobs, load.running_tokens)
    queued = capacity.share(load.queued_jobs, load.queued_tokens)
    if 0 < run_s < target_s:
        queued *= run_s / target_s
    return max(running + queued, LEAST)


def replicas(needed: float) -> int:
    """Whole workers."""
    return math.ceil(round(needed, 6))
