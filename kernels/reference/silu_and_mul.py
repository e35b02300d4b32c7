"""The gated activation of Llama's feed-forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.ops import register


@register("silu_and_mul", "reference")
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        x: [tokens, 2 * intermediate], gate then up.

    Returns:
        [tokens, intermediate].
    """
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)
