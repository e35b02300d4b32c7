"""Weights in the layout of those that compute with them, to be made once and kept."""

from __future__ import annotations

import torch

from kernels.ops import register
from kernels.packed import PackedFor, Weight


@register("pack", "reference")
def pack(weight: torch.Tensor, use: PackedFor = "linear") -> Weight:
    """A weight as the layers of this backend lay it out.

    Args:
        weight: [out, in]; not to be changed afterwards.
        use: which operations will take it.

    Returns:
        The weight itself, where the layers of this backend take it as it is.
    """
    return weight
