"""The gated activation of Gemma's feed-forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.ops import register


@register("gelu_and_mul", "reference")
def gelu_and_mul(x: torch.Tensor, tanh: bool = True) -> torch.Tensor:
    """`gelu(gate) * up`.

    Args:
        x: [tokens, 2 * intermediate], gate then up.
        tanh: GELU by its approximation with tanh, as Gemma was trained; else by the error function.

    Returns:
        [tokens, intermediate].
    """
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)
