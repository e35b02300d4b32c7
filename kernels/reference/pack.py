"""Weights in the layout of those that compute with them, to be made once and kept."""

from __future__ import annotations

import torch

from kernels.ops import register
from kernels.packed import Weight


@register("pack", "reference")
def pack(weight: torch.Tensor, gated: bool = False) -> Weight:
    """A weight for `linear` and `unembed`, or for `gated_linear`; `embed` takes it too, if it is not gated.

    Args:
        weight: [out, in]; not to be changed afterwards.
        gated: it is gate above up, for `gated_linear`.

    Returns:
        The weight itself, where the layers of this backend take it as it is.
    """
    return weight
