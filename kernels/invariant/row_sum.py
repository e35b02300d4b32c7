"""Sums over the last axis whose order depends on its length alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

#: From here on torch lets several threads share one row if it is alone.
_SPLIT_ROW = 32768


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """[..., n] float32 -> [..., 1]."""
    length = x.shape[-1]
    if x.device.type == "cpu" and length < _SPLIT_ROW:
        # One thread sums a row, by a scheme that knows of no other row.
        return x.sum(-1, keepdim=True)
    # Elsewhere the number of rows decides how one is split. So pairs are added, and pairs of those.
    x = F.pad(x, (0, (1 << (length - 1).bit_length()) - length))
    while x.shape[-1] > 1:
        low, high = x.chunk(2, -1)
        x = low + high
    return x
