"""The gated activation of Llama's feed-forward, and the feed-forward's first layer with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.reference.linear import Linear
from kernels.reference.linear import linear as plain_linear
from kernels.triton.launch import FLOATS, cdiv, check, check_tensor, power_of_2
from kernels.triton.rounding import rounded


@triton.jit
def silu_and_mul_kernel(x, out, width, x_stride, BLOCK: tl.constexpr):
    """One program computes a piece of one row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = x + token * x_stride + column
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0))) * up  # bounded: no overflow
    tl.store(out + token * width + column, rounded(y, out), mask=inside)


@register("silu_and_mul", "triton")
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Contract of the reference; rounded once.

    Raises:
        KernelInputError: the argument is not served.
    """
    check_tensor("silu_and_mul", "x", x, dtypes=FLOATS, shape=(None, None))
    check("silu_and_mul", x.shape[1] % 2 == 0, f"rows of {x.shape[1]} have no two halves")
    tokens, width = len(x), x.shape[1] // 2
    out = x.new_empty((tokens, width))
    if tokens and width:
        block = min(1024, power_of_2(width))
        silu_and_mul_kernel[(tokens, cdiv(width, block))](x, out, width, x.stride(0), BLOCK=block, num_warps=4)
    return out


@register("gated_linear", "triton")
def gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference: the matrix product is the library's, the activation the kernel's."""
    project = plain_linear(weight, bias)

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        return silu_and_mul(project(x, delta))

    return apply
