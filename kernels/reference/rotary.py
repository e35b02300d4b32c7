"""Rotary position embedding, halves layout as in Hugging Face checkpoints."""

from __future__ import annotations

import torch

from kernels.ops import register


@register("rotary", "reference")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate each pair (i, i + head_dim/2) of every head by its token's angle, in place.

    Args:
        x: [tokens, heads, head_dim]; tokens may be strided.
        cos: [tokens, 1, head_dim], the two halves equal, dtype of `x`.
        sin: [tokens, 1, head_dim], the first half negated: what multiplies the swapped halves.
    """
    tokens, heads, dim = x.shape
    swapped = x.view(tokens, heads, 2, dim // 2).flip(2).view(tokens, heads, dim)
    x.mul_(cos).addcmul_(swapped, sin)
