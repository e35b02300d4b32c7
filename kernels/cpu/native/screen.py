"""The arg-max over an output matrix, of which an 8-bit copy tells what need not be computed: see `src/screen.h`."""

from __future__ import annotations

import ctypes
import logging

import torch

from kernels.cpu.native import library as native
from kernels.cpu.native.library import DTYPES, SCREEN_STAGES, Batch, Instruction
from kernels.cpu.native.operations import Head, Panels, allocate
from kernels.ops import register
from kernels.reference.screen import Screen
from kernels.reference.unembed import Unembed

logger = logging.getLogger(__name__)


def screens() -> bool:
    """Whether the loaded library screens matrices: it does where the CPU has AVX-512 VNNI."""
    return _sizes(1, 1)[0] > 0


def _sizes(rows: int, columns: int) -> tuple[int, int]:
    """Bytes of the 8-bit copy and floats of its bounds; both 0 where such a matrix is not screened."""
    size, count = ctypes.c_int64(), ctypes.c_int64()
    native.library().ropeway_screen_sizes(rows, columns, ctypes.byref(size), ctypes.byref(count))
    return size.value, count.value


@register("screen", "cpu.native")
def screen(head: Unembed) -> Screen | None:
    """Contract of the reference; None also where the CPU has no VNNI. Takes a byte for each weight of the matrix."""
    if not isinstance(head, Head):
        return None
    packed, compact = head.panels.packed, head.panels.compact
    rows, columns, dtype = packed.rows, packed.columns, DTYPES[packed.dtype]
    size, count = _sizes(rows, columns)
    if not size:
        return None
    coarse, bounds, source = allocate(size), torch.empty(count), packed.data.data_ptr()
    done = native.library().ropeway_screen_pack(
        source, rows, columns, dtype, compact, coarse.data_ptr(), bounds.data_ptr()
    )
    if not done:
        logger.warning("the output matrix has weights that are not finite or very large: greedy tokens take all logits")
        return None
    return _Screen(head.panels, coarse, bounds)


class _Screen:
    """A matrix with its 8-bit copy."""

    def __init__(self, panels: Panels, coarse: torch.Tensor, bounds: torch.Tensor) -> None:
        self._matrix = panels, coarse, bounds
        self._last = _Call(torch.empty((0, panels.packed.columns), dtype=panels.packed.dtype), *self._matrix)

    def __call__(self, hidden: torch.Tensor) -> list[int]:
        call = self._last
        if call.hidden is not hidden:
            call = self._last = _Call(hidden, *self._matrix)
        native.run(call.stages, len(SCREEN_STAGES), call.batch)
        return call.tokens[:]


class _Call:
    """What the library is told; it stays as it is while the rows are in the same tensor, as those of decodes are."""

    def __init__(self, hidden: torch.Tensor, panels: Panels, coarse: torch.Tensor, bounds: torch.Tensor) -> None:
        packed = panels.packed
        self.hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        self.tokens = (ctypes.c_int64 * len(hidden))()
        self._record = native.Screen(
            self.hidden.data_ptr(),
            packed.data.data_ptr(),
            coarse.data_ptr(),
            bounds.data_ptr(),
            ctypes.addressof(self.tokens),
            self.hidden.stride(0),
            packed.columns,
            packed.rows,
            DTYPES[packed.dtype],
            panels.compact,
        )
        address = ctypes.addressof(self._record)
        self.stages = (Instruction * len(SCREEN_STAGES))(*[Instruction(stage, address) for stage in SCREEN_STAGES])
        self.batch = Batch(rows=len(hidden))
