"""The output matrix over a weight that oneDNN has reordered."""

from __future__ import annotations

import torch

from kernels.blocked import BlockedLogits
from kernels.cpu.linear import linear
from kernels.ops import register
from kernels.reference.unembed import Unembed


@register("unembed", "cpu")
def unembed(weight: torch.Tensor) -> Unembed:
    """Contract of the reference."""
    project = linear(weight)

    def apply(hidden: torch.Tensor, delta: torch.Tensor | None = None) -> BlockedLogits:
        return BlockedLogits.of(project(hidden, delta))

    return apply
