"""The output matrix: from hidden states to logits as sampling takes them."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.blocked import BlockedLogits
from kernels.ops import register
from kernels.reference.linear import linear


class Unembed(Protocol):
    """A prepared output matrix."""

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None = None) -> BlockedLogits:
        """[rows, hidden] -> logits of [rows, vocab]; they may lie where those of the last call with this tensor lay."""


@register("unembed", "reference")
def unembed(weight: torch.Tensor) -> Unembed:
    """A function `x, delta -> x @ weight.T + delta` for [rows, hidden]; `delta` is [rows, vocab] float32 or None.

    Args:
        weight: [vocab, hidden], or that as `pack` has made it; not to be changed afterwards.
    """

    project = linear(weight)

    def apply(hidden: torch.Tensor, delta: torch.Tensor | None = None) -> BlockedLogits:
        return BlockedLogits.of(project(hidden, delta))

    return apply
