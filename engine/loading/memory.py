"""Memory of a load: large allocations for weights, and what was used and freed goes back to the system."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

_LINE = 64


def large_bytes(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes at the start of a cache line; NumPy asks the system for large pages."""
    raw = np.empty(size + _LINE, dtype=np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + size]


def give_back_freed_memory() -> None:
    """Have glibc return what it keeps of freed memory: after a checkpoint was converted that can be more than the
    weights. Other C libraries keep less, and have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
