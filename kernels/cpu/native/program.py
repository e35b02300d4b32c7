"""Programs: operations that run at once, or that are recorded and run together in one call, for any number of rows."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.native.library import OPERATIONS, Batch, Instruction, Record, run

_ALIGNMENT = 64
_local = threading.local()

Bytes = npt.NDArray[np.uint8]


class CaptureError(Exception):
    """A forward pass cannot be recorded, because not all of it is native; the message says what is not."""


class Recorder:
    """Takes operations instead of running them.

    Buffers are reused as soon as Python lets go of the tensors over them: what is recorded later runs later.

    Attributes:
        rows: of all tensors of the program; those that run are the batch's own first rows.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._slabs: list[Bytes] = []
        self._free: dict[int, list[Bytes]] = {}
        self._records: list[Record] = []
        self._kept: dict[int, torch.Tensor] = {}

    def empty(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, width] of memory that belongs to the program."""
        size = self.rows * width * dtype.itemsize
        free = self._free.setdefault(size, [])
        slab = free.pop() if free else self._allocate(size)
        # The view lives as long as a tensor does that is made from it.
        view = slab[:]
        weakref.finalize(view, free.append, slab)
        return torch.frombuffer(view, dtype=dtype).view(self.rows, width)

    def _allocate(self, size: int) -> Bytes:
        raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        slab = raw[start : start + size]
        self._slabs.append(slab)
        return slab

    def add(self, record: Record, tensors: tuple[torch.Tensor, ...]) -> None:
        """Append an operation. `tensors` are all that it points to."""
        self._records.append(record)
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if not any(slab.ctypes.data <= address < slab.ctypes.data + slab.nbytes for slab in self._slabs):
                self._kept.setdefault(address, tensor)

    def program(self) -> Program:
        """All that was recorded."""
        return Program(self._records, [*self._slabs, *self._kept.values()])


class Program:
    """Operations that run in one call."""

    def __init__(self, records: list[Record], kept: list[Any]) -> None:
        """`kept` is what the records point to."""
        self._records, self._kept = records, kept
        self._instructions = _instructions(records)

    def __len__(self) -> int:
        return len(self._records)

    def run(self, batch: Batch) -> None:
        """Run it for a batch."""
        run(self._instructions, len(self._records), batch)


class _Guard(TorchDispatchMode):
    """Refuses what torch would compute while a pass is recorded: the program would lack it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else the first operation imports torch's compiler, which takes seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            raise CaptureError(f"{func} is computed by torch")
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(rows: int) -> Iterator[Recorder]:
    """Within it, the native operations of this thread are recorded.

    Raises:
        CaptureError: torch is to compute something.
    """
    recorder = Recorder(rows)
    _local.recorder = recorder
    try:
        with _Guard():
            yield recorder
    finally:
        _local.recorder = None


def recorder() -> Recorder | None:
    """The one that is at work in this thread."""
    return getattr(_local, "recorder", None)


def empty(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, width] for a result."""
    active = recorder()
    return torch.empty((rows, width), dtype=dtype) if active is None else active.empty(width, dtype)


def issue(record: Record, rows: int, *tensors: torch.Tensor, batch: Batch | None = None) -> None:
    """Run or record an operation over so many rows.

    Args:
        record: the operation.
        rows: of its tensors.
        tensors: all that it points to.
        batch: what it needs to know of sequences if it runs at once.
    """
    active = recorder()
    if active is not None:
        if rows != active.rows:
            raise CaptureError(f"an operation has {rows} rows, the program {active.rows}")
        active.add(record, tensors)
        return
    run(_instructions([record]), 1, Batch(rows=rows) if batch is None else batch)


def _instructions(records: list[Record]) -> ctypes.Array[Instruction]:
    pairs = [Instruction(OPERATIONS[type(record)], ctypes.addressof(record)) for record in records]
    return (Instruction * len(pairs))(*pairs)
