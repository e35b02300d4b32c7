"""Which kernels compute on a CPU: the native ones where they can be used, else torch's; and with how many threads."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache_folder import default_cache_dir
from engine.config import CpuKernels, EngineConfig
from engine.cpus import pinned_cpus
from engine.models.config import ModelConfig
from kernels.cpu import native

logger = logging.getLogger(__name__)


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
        cpus = pinned_cpus(config.cpu_pinning, threads)
        native.set_threads(threads)
        native.set_affinity(cpus)
        pinned = f", pinned to CPUs {cpus}" if cpus else ""
        logger.info("native CPU kernels, %s, on %d threads%s", choice.reason, threads, pinned)
    elif config.cpu_kernels == "auto":
        logger.warning("CPU kernels of torch: %s", choice.reason)
    if config.cpu_pinning != "none" and not choice.native:
        logger.warning("cpu_pinning is not used: it is for the native kernels")
    return choice.native
