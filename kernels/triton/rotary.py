"""Rotary position embedding in place: both halves of a head in one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.triton.launch import FLOATS, cdiv, check, check_tensor, power_of_2
from kernels.triton.rounding import rounded

#: Heads of one program.
HEADS = 8


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    heads,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program rotates some heads of one token: it reads both halves, then writes both."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF_PADDED)
    real = pair < HALF
    inside = (head < heads)[:, None] & real[None, :]
    low = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    a = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = cos + token * cos_stride + pair
    cos_a = tl.load(turn, mask=real, other=0.0).to(tl.float32)
    cos_b = tl.load(turn + HALF, mask=real, other=0.0).to(tl.float32)
    turn = sin + token * sin_stride + pair
    sin_a = tl.load(turn, mask=real, other=0.0).to(tl.float32)
    sin_b = tl.load(turn + HALF, mask=real, other=0.0).to(tl.float32)
    tl.store(low, rounded(a * cos_a[None, :] + b * sin_a[None, :], x), mask=inside)
    tl.store(low + HALF, rounded(b * cos_b[None, :] + a * sin_b[None, :], x), mask=inside)


@register("rotary", "triton")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Contract of the reference; rounded once.

    Raises:
        KernelInputError: the arguments are not served.
    """
    name = "rotary"
    check_tensor(name, "x", x, dtypes=FLOATS, shape=(None, None, None))
    tokens, heads, dim = x.shape
    check(name, dim % 2 == 0 and 2 <= dim <= 512, f"heads of {dim}; served are even sizes up to 512")
    for label, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, label, table, dtypes=FLOATS, shape=(tokens, 1, dim), device=x.device)
    if not tokens or not heads:
        return
    rotary_kernel[(tokens, cdiv(heads, HEADS))](
        x,
        cos,
        sin,
        heads,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        sin.stride(0),
        HALF=dim // 2,
        HALF_PADDED=power_of_2(dim // 2),
        HEADS=HEADS,
        num_warps=4,
    )
