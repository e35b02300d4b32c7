"""Memory that a load has used and freed goes back to the system."""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> None:
    """Have glibc return what it keeps of freed memory: after a checkpoint was converted that can be more than the
    weights. Other C libraries keep less, and have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
