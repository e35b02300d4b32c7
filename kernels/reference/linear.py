"""Linear layers, prepared once at load so that a device may keep the weight in a layout of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.ops import register
from kernels.reference.silu_and_mul import silu_and_mul

Linear = Callable[[torch.Tensor], torch.Tensor]


@register("linear", "reference")
def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A function `x -> x @ weight.T + bias`.

    Args:
        weight: [out, in]; not to be changed afterwards.
        bias: [out] or None.
    """

    def apply(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return apply


@register("gated_linear", "reference")
def gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A function `x -> silu(x @ gate.T) * (x @ up.T)`.

    Args:
        weight: [2 * intermediate, in], gate then up.
        bias: [2 * intermediate] or None.
    """

    def apply(x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(F.linear(x, weight, bias))

    return apply
