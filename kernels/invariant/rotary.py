"""Rotary position embedding by operations that round each on its own."""

from __future__ import annotations

import torch

from kernels.ops import register


@register("rotary", "invariant")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Contract of the reference, whose fused multiply-add may round at a vector's end as it does not within it."""
    tokens, heads, dim = x.shape
    swapped = x.view(tokens, heads, 2, dim // 2).flip(2).view(tokens, heads, dim)
    x.mul_(cos).add_(swapped.mul_(sin))
