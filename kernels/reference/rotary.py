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
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
