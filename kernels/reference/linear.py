"""Linear layers, prepared once at load so that a device may keep the weight in a layout of its own."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.ops import register
from kernels.reference.silu_and_mul import silu_and_mul


class Linear(Protocol):
    """A prepared layer."""

    def __call__(self, x: torch.Tensor, delta: Any = None) -> torch.Tensor:
        """[tokens, in] -> [tokens, out]; `delta`, of the same backend's `lora_delta`, is added to the matrix product.

        It is [tokens, columns] float32, or what the backend has instead.
        """


@register("linear", "reference")
def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A function `x, delta -> x @ weight.T + bias + delta`.

    Args:
        weight: [out, in], or that as `pack` has made it; not to be changed afterwards.
        bias: [out] or None.
    """

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        return y if delta is None else y.add_(delta)

    return apply


@register("gated_linear", "reference")
def gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A function `x, delta -> silu(x @ gate.T + delta) * (x @ up.T + delta)`, each with its own half of `delta`.

    Args:
        weight: [2 * intermediate, in], gate then up; or that as `pack` has made it.
        bias: [2 * intermediate] or None.
    """

    project = linear(weight, bias)

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        return silu_and_mul(project(x, delta))

    return apply
