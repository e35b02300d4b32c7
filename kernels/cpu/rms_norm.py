"""RMS normalisation in few passes: a norm reduction, and one scaling in place."""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.ops import register


@register("rms_norm", "cpu")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Contract of the reference; the product with the weight is rounded once instead of twice."""
    y = x if residual is None else residual.add_(x)
    wide = y.float()
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(_scalar(eps), norm, norm, value=1.0 / wide.shape[-1]).rsqrt_()
    if wide is y:
        return torch.mul(wide, scale).mul_(weight)
    return wide.mul_(scale).mul_(weight).to(x.dtype)


@lru_cache(maxsize=16)
def _scalar(value: float) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value)
