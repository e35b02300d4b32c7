"""Which kernels compute on a CPU: the native ones where they can be used, else torch's; and with how many threads."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache_folder import default_cache_dir
from engine.config import CpuKernels, EngineConfig
from engine.models.config import ModelConfig
from kernels.cpu import native

logger = logging.getLogger(__name__)

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why in one line."""

    native: bool
    reason: str


def choose(asked: CpuKernels, cache_dir: Path | None = None) -> Choice:
    """Whether this process uses the native kernels; they are built and loaded if so.

    Args:
        asked: the setting.
        cache_dir: where the built library is kept; None: the user's cache folder.
    """
    if asked == "torch":
        return Choice(False, "cpu_kernels is torch")
    try:
        native.load(cache_dir or default_cache_dir())
    except native.NativeUnavailableError as error:
        return Choice(False, str(error))
    return Choice(True, f"built for {native.paths()}")


def use_native(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether an engine uses the native kernels, which are then loaded and know their number of threads.

    Raises:
        ValueError: they are asked for and cannot be used.
    """
    choice = choose(config.cpu_kernels, config.cache_dir)
    if choice.native and (reason := native.unserved(model.head_dim, dtype)) is not None:
        choice = Choice(False, reason)
    if config.cpu_kernels == "native" and not choice.native:
        raise ValueError(f"cpu_kernels native: {choice.reason}")
    if choice.native:
        threads = torch.get_num_threads()  # which `bounded_threads` has bounded
        native.set_threads(threads)
        logger.info("native CPU kernels, %s, on %d threads", choice.reason, threads)
    elif config.cpu_kernels == "auto":
        logger.warning("CPU kernels of torch: %s", choice.reason)
    return choice.native


def bounded_threads(wanted: int) -> int:
    """No more threads than this process has CPUs, by affinity and by its group's quota."""
    usable = available_cpus()
    if wanted > usable:
        logger.warning(
            "%d threads are asked for, and this process may use %d CPUs: %d are used", wanted, usable, usable
        )
    return min(wanted, usable)


def available_cpus() -> int:
    """CPUs of this process by affinity and by the quota of its control group, rounded up; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _quota() -> float | None:
    """CPUs that the group may use together; None: as many as there are."""
    try:
        limit, period = _QUOTA.read_text("ascii").split()[:2]
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
