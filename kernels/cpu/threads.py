"""How many of torch's threads compute: those of a pass, or one where a region is too small to wake others for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_pass = threading.local()

#: Bytes that one thread reads in some 200 us. Waking another takes about 60, and where its core has other work, far
#: more. Of matrices of 0.7 to 1.8 MB, 150 in a row, one thread took 14 ms for 1 to 4 rows and 17 for 8; two that sleep
#: in between took 14 to 18 ms with a core each, and 24 to 26 beside other work. Two that are awake need
#: 0.65 of one's time.
SMALL = 4 * 1024 * 1024
#: Rows up to which a product takes hardly longer than its weights take to be read.
FEW_ROWS = 8


@contextmanager
def sharing(threads: int) -> Iterator[None]:
    """A pass whose regions run on so many threads of the calling thread, which are awake: then small ones, too, are
    worth all of them. Without OpenMP nothing is changed."""
    choose = _set_threads()
    if choose is None:
        yield
        return
    before = torch.get_num_threads()
    choose(threads)
    _pass.awake = True
    try:
        yield
    finally:
        _pass.awake = False
        choose(before)


def unless_awake(call: Callable[..., T], *args: Any) -> T:
    """`alone`, where to wake other threads costs more than they bring."""
    return call(*args) if getattr(_pass, "awake", False) else alone(call, *args)


def alone(call: Callable[..., T], *args: Any) -> T:
    """`call(*args)`, whose parallel regions run on the calling thread alone; other threads' regions are not touched."""
    threads = torch.get_num_threads()
    choose = _set_threads()
    if threads == 1 or choose is None:
        return call(*args)
    choose(1)
    try:
        return call(*args)
    finally:
        choose(threads)


@lru_cache(maxsize=1)
def _set_threads() -> Callable[[int], None] | None:
    """OpenMP's own, which is of the calling thread; None where torch's threads are another library's.

    torch's is of the process: a thread that first computes in the meantime would keep to one thread for good.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        # Names are looked for in the libraries that this one is linked with, too. PyDLL keeps the interpreter's lock.
        choose = getattr(ctypes.PyDLL(str(library)), "omp_set_num_threads", None)
        if choose is not None:
            choose.argtypes, choose.restype = (ctypes.c_int,), None
            return choose
    return None
