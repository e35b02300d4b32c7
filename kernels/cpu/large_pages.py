"""Large pages for weights that lie where a library has put them, among its other memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

#: Bytes of a large page, and of what is too small to be worth a call of the system.
_LARGE, _LEAST = 2 * 1024 * 1024, 256 * 1024
#: Linux, from 6.1 on: what is in small pages goes into large ones at once. An older one refuses it.
_MADV_COLLAPSE = 25


def move_into_large_pages(address: int, size: int) -> bool:
    """Have the system move memory, and what is beside it up to the bounds of large pages, into such pages.

    Addresses and what memory holds stay as they are. What lies within the bounds of a large page that is not mapped as
    a whole stays where it is: a weight's end, until more is allocated behind it and moved.

    Args:
        address: of the first byte; it must stay mapped meanwhile.
        size: bytes.

    Returns:
        Whether all of it is in large pages now; not where it is small, or the system has none.
    """
    madvise = _madvise()
    if madvise is None or size < _LEAST:
        return False
    first = address // _LARGE * _LARGE
    return madvise(first, -(-(address + size) // _LARGE) * _LARGE - first, _MADV_COLLAPSE) == 0


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise.restype = ctypes.c_int
    return madvise
