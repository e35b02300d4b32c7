"""Root mean square normalisation, with the residual sum before it."""

from __future__ import annotations

import torch

from kernels.ops import register


@register("rms_norm", "reference")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`y / sqrt(mean(y^2) + eps) * weight` over the last axis, computed in float32, where `y` is `x`.

    With a residual, `residual += x` comes first, in place, and `y` is the sum.

    Args:
        x: [tokens, hidden].
        weight: [hidden].
        residual: [tokens, hidden] or None.

    Returns:
        [tokens, hidden] in the dtype of the weight; that of `x` and of the residual may be wider.
    """
    y = x if residual is None else residual.add_(x)
    wide = y.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
