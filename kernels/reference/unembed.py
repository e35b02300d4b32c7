"""The output matrix: from hidden states to logits as sampling takes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.blocked import BlockedLogits
from kernels.ops import register


@register("unembed", "reference")
def unembed(weight: torch.Tensor) -> Callable[[torch.Tensor], BlockedLogits]:
    """A function `x -> x @ weight.T` for [rows, hidden].

    Args:
        weight: [vocab, hidden]; not to be changed afterwards.
    """

    def apply(hidden: torch.Tensor) -> BlockedLogits:
        return BlockedLogits.of(F.linear(hidden, weight))

    return apply
