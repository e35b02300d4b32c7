"""What Triton's kernels store is rounded to nearest, ties to even, in the interpreter too."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.rounding import rounded


@triton.jit
def store_kernel(x, out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, rounded(tl.load(x + place), out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_stored_as_torch_converts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4096) * torch.logspace(-3, 3, 4096)
    ties = [1.00390625, 1.01171875, -1.00390625, -1.01171875]
    x[:11] = torch.tensor([*ties, 0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.0e4, -3.0e4])
    out = torch.full((4096,), float("nan"), dtype=dtype)
    store_kernel[(1,)](x, out, 4096)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)
