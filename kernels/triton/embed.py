"""Rows of a table by number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.triton.launch import FLOATS, cdiv, check_tensor, power_of_2


@triton.jit
def embed_kernel(table, ids, out, entries, width, table_stride, BLOCK: tl.constexpr):
    """One program copies a piece of one row. A number without a row gives NaN: nothing is read there."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(ids + token)
    known = tl.where((entry >= 0) & (entry < entries), width, 0)
    row = tl.load(table + entry * table_stride + column, mask=column < known, other=float("nan"))
    tl.store(out + token * width + column, row, mask=column < width)


@register("embed", "triton")
def embed(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Contract of the reference, but an id that is not in the table gives a row of NaN: the host does not wait.

    Raises:
        KernelInputError: the arguments are not served.
    """
    check_tensor("embed", "table", table, dtypes=FLOATS, shape=(None, None))
    check_tensor("embed", "ids", ids, dtypes=(torch.int64,), shape=(None,), device=table.device)
    tokens, (entries, width) = len(ids), table.shape
    out = table.new_empty((tokens, width))
    if tokens and width:
        block = min(1024, power_of_2(width))
        embed_kernel[(tokens, cdiv(width, block))](
            table, ids, out, entries, width, table.stride(0), BLOCK=block, num_warps=4
        )
    return out
