"""The output matrix over a weight that oneDNN has reordered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.blocked import BlockedLogits
from kernels.cpu.linear import linear
from kernels.ops import register


@register("unembed", "cpu")
def unembed(weight: torch.Tensor) -> Callable[[torch.Tensor], BlockedLogits]:
    """Contract of the reference."""
    project = linear(weight)

    def apply(hidden: torch.Tensor) -> BlockedLogits:
        return BlockedLogits.of(project(hidden))

    return apply
