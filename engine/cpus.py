"""CPUs of this process: how many there are, how many threads compute on them, and on which. Imports no torch."""

from __future__ import annotations

import logging
import math
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

#: From so many CPUs on a worker leaves one to those beside it. With fewer, one CPU is worth more than they ask for.
RESERVED_FROM = 8

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
#: What the library's sets of CPUs hold.
_MOST_CPUS = 1024
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def available_cpus() -> int:
    """CPUs of this process by affinity and by the quota of its control group, rounded up; at least 1."""
    count, quota = len(_affinity()), _quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def bounded_threads(wanted: int) -> int:
    """No more threads than this process has CPUs, by affinity and by its group's quota."""
    usable = available_cpus()
    if wanted > usable:
        logger.warning(
            "%d threads are asked for, and this process may use %d CPUs: %d are used", wanted, usable, usable
        )
    return min(wanted, usable)


def serving_threads() -> int | None:
    """Threads of a worker that is told no number: all CPUs but one, which is for those beside it, where there are
    `RESERVED_FROM` or more; None: as many as torch takes."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    usable = available_cpus()
    return usable - 1 if usable >= RESERVED_FROM else None


def check_pinning(pinning: str) -> None:
    """Refuse what is no value of the setting.

    Raises:
        ValueError: it is none of `none`, `auto` and a list of CPUs.
    """
    if pinning not in ("none", "auto"):
        _listed(pinning)


def pinned_cpus(pinning: str, threads: int) -> list[int]:
    """A CPU for each thread; empty where they are not pinned.

    Args:
        pinning: `none`; `auto`: CPUs of this process, those of different cores first; or a list such as `0-3,8`.
        threads: that compute.

    Raises:
        ValueError: it is none of these, has fewer CPUs than there are threads, or one that this process may not use.
    """
    if pinning == "none":
        return []
    allowed = _affinity()
    cpus = _by_core(allowed) if pinning == "auto" else _listed(pinning)
    if foreign := [cpu for cpu in cpus if cpu not in allowed]:
        raise ValueError(f"cpu_pinning: this process may not use CPU {foreign[0]}, only {_spelled(allowed)}")
    if len(cpus) < threads:
        raise ValueError(f"cpu_pinning: {len(cpus)} CPUs for {threads} threads; name more, or set threads")
    return cpus[:threads]


def _listed(pinning: str) -> list[int]:
    cpus: list[int] = []
    for part in pinning.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first or last >= _MOST_CPUS:
            raise ValueError(f"cpu_pinning must be none, auto or a list of CPUs such as 0-3,8, not {pinning!r}")
        cpus += range(first, last + 1)
    if len(set(cpus)) < len(cpus):
        raise ValueError(f"cpu_pinning: {pinning!r} names a CPU twice")
    return cpus


def _by_core(cpus: list[int]) -> list[int]:
    """The first of each core, then the second ones, and so on."""
    taken: dict[str, int] = {}
    turns: list[tuple[int, int]] = []
    for cpu in cpus:
        try:
            core = Path(_SIBLINGS.format(cpu)).read_text("ascii")
        except (OSError, UnicodeDecodeError):
            core = str(cpu)
        turns.append((taken.get(core, 0), cpu))
        taken[core] = turns[-1][0] + 1
    return [cpu for _, cpu in sorted(turns)]


def _spelled(cpus: list[int]) -> str:
    return ",".join(map(str, cpus))


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota() -> float | None:
    """CPUs that the group may use together; None: as many as there are."""
    try:
        limit, period = _QUOTA.read_text("ascii").split()[:2]
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
