"""What log probabilities are made of: each row's best tokens, the sum that its softmax divides by, and ranks.

As in sampling, a row's results do not depend, bit for bit, on other rows or on their number.
"""

from __future__ import annotations

import math

import torch

from kernels.blocked import BlockedLogits
from kernels.ops import register


@register("argmax", "reference")
def argmax(x: BlockedLogits) -> torch.Tensor:
    """[rows] int64: the first token of each row that has the maximum; any token where that is NaN."""
    return x.values.max(-1).indices


@register("log_sum_exp", "reference")
def log_sum_exp(x: BlockedLogits) -> torch.Tensor:
    """[rows] float64: the logarithm of the sum of exp(logit), whose maximum is finite."""
    # A running sum goes from block to block, in one order however many rows there are; and an array's logarithms may
    # depend on its length in the last bit.
    total = (x.blocks - x.best.view(-1, 1, 1)).exp_().sum(-1).double().cumsum(-1)[:, -1]
    logs = [math.log(each) for each in total.tolist()]
    return torch.tensor(logs, dtype=torch.float64, device=total.device) + x.best


@register("largest", "reference")
def largest(x: BlockedLogits, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row and their token ids: descending, equal ones by id.

    Args:
        x: without NaN.
        count: from 1 to the vocabulary's size.

    Returns:
        [rows, count] float32 and [rows, count] int64.
    """
    values, ids = x.values.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


@register("count_above", "reference")
def count_above(x: BlockedLogits, limit: torch.Tensor) -> torch.Tensor:
    """[rows] int64: how many logits of each row are larger than its `limit`, [rows] float32."""
    return (x.values > limit.unsqueeze(1)).sum(-1)
