"""The gated activation of Gemma's feed-forward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.triton.launch import FLOATS, cdiv, check, check_tensor, power_of_2
from kernels.triton.rounding import rounded


@triton.jit
def gelu_and_mul_kernel(x, out, width, x_stride, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """One program computes a piece of one row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = x + token * x_stride + column
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        # (1 + tanh(z)) / 2 is the logistic function of 2z: sqrt(2 / pi) * 2 is 1.5957691...
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        share = 1.0 / (1.0 + tl.exp(tl.minimum(-inner, 88.0)))  # bounded: no overflow
    else:
        share = 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    tl.store(out + token * width + column, rounded(gate * share * up, out), mask=inside)


@register("gelu_and_mul", "triton")
def gelu_and_mul(x: torch.Tensor, tanh: bool = True) -> torch.Tensor:
    """Contract of the reference; rounded once.

    Raises:
        KernelInputError: the argument is not served.
    """
    check_tensor("gelu_and_mul", "x", x, dtypes=FLOATS, shape=(None, None))
    check("gelu_and_mul", x.shape[1] % 2 == 0, f"rows of {x.shape[1]} have no two halves")
    tokens, width = len(x), x.shape[1] // 2
    out = x.new_empty((tokens, width))
    if tokens and width:
        block = min(1024, power_of_2(width))
        gelu_and_mul_kernel[(tokens, cdiv(width, block))](
            x, out, width, x.stride(0), BLOCK=block, TANH=tanh, num_warps=4
        )
    return out
