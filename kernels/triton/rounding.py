"""How float32 becomes what a tensor holds."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED

#: Triton's interpreter cuts numbers off where they become bfloat16; devices round them to nearest, ties to even.
CUTS_OFF: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, pointer):
    """float32 numbers as elements of what `pointer` points to, to nearest, ties to even."""
    if CUTS_OFF and pointer.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(pointer.dtype.element_ty)
