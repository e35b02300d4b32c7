"""`ropeway doctor`: what computes on this machine, and why; and whether a Redis is well."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

from ropeway.console import out


def doctor(redis_url: str | None = None) -> int:
    """Print one line per question, of a Redis too where one is named.

    Returns:
        The exit code: 1 if something is to be mended.

    Raises:
        InvalidRequestError: the URL is none.
        ModuleNotFoundError: what a worker needs is not installed; a Redis is looked at all the same.
    """
    if redis_url is None:
        _here()
        return 0
    try:
        _here()
    except ModuleNotFoundError as error:
        out.print(f"{'worker':<12} none can run here: {error.name} is not installed", soft_wrap=True, markup=False)
    from ropeway.doctor_redis import redis_findings

    found = redis_findings(redis_url)
    for finding in found:
        out.print(f"{finding.name:<12} {finding.value}", soft_wrap=True, markup=False)
        if finding.mend is not None:
            out.print(f"{'':<12} -> {finding.mend}", soft_wrap=True, markup=False)
    return int(any(finding.mend is not None for finding in found))


def _here() -> None:
    for name, value in findings():
        out.print(f"{name:<12} {value}", soft_wrap=True, markup=False)


def findings() -> Iterator[tuple[str, str]]:
    """Names and values. To know whether the native kernels can be used, they are built and loaded."""
    import torch

    from engine.build import choose_device, choose_dtype
    from engine.cache_folder import default_cache_dir
    from engine.cpu_kernels import choose
    from engine.cpus import available_cpus
    from kernels.backends import has_triton
    from shared.settings import WorkerSettings

    settings = WorkerSettings()
    cache = settings.cache_dir or default_cache_dir()
    device = choose_device(settings.device)
    yield "python", f"{platform.python_version()}, torch {torch.__version__}"
    yield "device", f"{device}, {str(choose_dtype(settings.dtype, device)).removeprefix('torch.')}"
    yield "cpus", f"{os.cpu_count()}, of which this process may use {available_cpus()}"
    yield "threads", _threads(settings.threads, torch.get_num_threads(), settings.cpu_pinning)
    yield "kernels", f"{settings.kernels}; triton {'is' if has_triton() else 'is not'} installed"
    choice = choose(settings.cpu_kernels, cache)
    unused = "" if device.type == "cpu" and settings.kernels == "auto" else "; not used here"
    yield "cpu kernels", f"{'native' if choice.native else 'torch'}: {choice.reason}{unused}"
    yield "greedy", _greedy(settings.screen_head, choice.native and device.type == "cpu")
    yield "cache", str(cache)


def _threads(asked: int | None, torchs: int, pinning: str) -> str:
    """How many threads a worker computes with, why, and on which CPUs."""
    from engine.cpus import available_cpus, pinned_cpus, serving_threads

    if asked is not None:
        wanted, why = asked, "the setting threads"
    elif (serving := serving_threads()) is not None:
        wanted, why = serving, "one CPU is left to gateway and Redis"
    elif "OMP_NUM_THREADS" in os.environ:
        wanted, why = torchs, "OMP_NUM_THREADS"
    else:
        wanted, why = torchs, "all CPUs"
    used = min(wanted, available_cpus())
    if used < wanted:
        why = f"{wanted} by {why}, and there are {used} CPUs"
    try:
        cpus = pinned_cpus(pinning, used)
    except ValueError as error:
        return f"{used} ({why}); {error}"
    return f"{used} ({why})" + (f", pinned to CPUs {', '.join(map(str, cpus))}" if cpus else "")


def _greedy(wanted: bool, native: bool) -> str:
    """How greedy tokens are found."""
    from kernels.cpu.native import screens

    if not wanted:
        return "from all logits: screen_head is off"
    if not native:
        return "from all logits: the native CPU kernels are not used"
    if not screens():
        return "from all logits: this CPU has no AVX-512 VNNI"
    return "screened by an 8-bit copy of the output matrix"
