"""RMS normalisation of each row by itself."""

from __future__ import annotations

import torch

from kernels.invariant.row_sum import row_sum
from kernels.ops import register


@register("rms_norm", "invariant")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Contract of the reference; the product with the weight is rounded once instead of twice."""
    y = x if residual is None else residual.add_(x)
    wide = y.float()
    scale = row_sum(wide.square()).mul_(1.0 / wide.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(wide, scale).mul_(weight).to(x.dtype)
