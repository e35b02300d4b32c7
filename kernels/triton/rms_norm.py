"""Root mean square normalisation with the residual sum before it, in one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.triton.launch import FLOATS, check, check_tensor, power_of_2
from kernels.triton.rounding import rounded

#: A row is held in registers: 32 numbers for each of 16 warps' threads.
WIDEST = 16384


@triton.jit
def rms_norm_kernel(
    x, weight, residual, out, width, x_stride, residual_stride, eps, BLOCK: tl.constexpr, WITH_RESIDUAL: tl.constexpr
):
    """One program normalises one row; its sum has the order that the width decides."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    y = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if WITH_RESIDUAL:
        place = residual + token * residual_stride + column
        summed = rounded(tl.load(place, mask=inside, other=0.0).to(tl.float32) + y, residual)
        tl.store(place, summed, mask=inside)
        y = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, rounded(y * scale * w, out), mask=inside)


def warps_for(width: int) -> int:
    """So that a thread holds some 16 numbers of a row."""
    return min(16, max(1, power_of_2(width) // 512))


@register("rms_norm", "triton")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Contract of the reference; rounded once, after the product with the weight.

    Raises:
        KernelInputError: the arguments are not served.
    """
    name = "rms_norm"
    check_tensor(name, "x", x, dtypes=FLOATS, shape=(None, None))
    tokens, width = x.shape
    check(name, 0 < width <= WIDEST, f"rows of {width}; served are up to {WIDEST}")
    check_tensor(name, "weight", weight, dtypes=FLOATS, shape=(width,), device=x.device)
    if residual is not None:
        check_tensor(name, "residual", residual, dtypes=FLOATS, shape=(tokens, width), device=x.device)
    out = torch.empty((tokens, width), dtype=weight.dtype, device=x.device)
    if tokens:
        rms_norm_kernel[(tokens,)](
            x,
            weight,
            x if residual is None else residual,
            out,
            width,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            BLOCK=power_of_2(width),
            WITH_RESIDUAL=residual is not None,
            num_warps=warps_for(width),
        )
    return out
