"""Log probabilities' parts, from the maxima of blocks; same contracts as the references."""

from __future__ import annotations

import numpy as np
import torch

from kernels.blocked import BLOCK, BlockedLogits
from kernels.cpu.blocks import Floats, Ints, pairs, take
from kernels.ops import register

_LOW = 0xFFFFFFFF


@register("argmax", "cpu")
def argmax(x: BlockedLogits) -> torch.Tensor:
    """Contract of the reference."""
    block = x.peaks.argmax(-1).numpy()
    inside = take(x, np.arange(len(block)), block).argmax(-1)
    return inside.add_(torch.from_numpy(block), alpha=BLOCK)


@register("largest", "cpu")
def largest(x: BlockedLogits, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of the reference.

    The `count` best blocks, of equal maxima the first ones, hold the `count` best tokens: each of those blocks has one
    that is larger than all of another block, or as large and before it.
    """
    rows, blocks = x.peaks.shape
    if count < blocks:
        keys = _best(_keys(x.peaks.numpy(), np.arange(blocks)), count)
        block = _LOW - (keys & _LOW)
        values = take(x, np.repeat(np.arange(rows), count), block.reshape(-1)).view(rows, -1).numpy()
        ids = (block[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(rows, -1)
    else:
        values, ids = x.values.numpy(), np.arange(x.values.shape[1])
    token = torch.from_numpy(_LOW - (_best(_keys(values, ids), count) & _LOW))
    return x.values.gather(1, token), token


def _keys(values: Floats, ids: Ints) -> Ints:
    """Numbers in the order of the values, and for equal values against the order of ids: no two are equal."""
    # Added, 0 turns -0 into 0. The bits of a negative number run against its value.
    bits = (values + np.float32(0.0)).view(np.int32).astype(np.int64)
    bits = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits << 32) | (_LOW - ids)


def _best(keys: Ints, count: int) -> Ints:
    """The `count` largest of each row, descending."""
    if count < keys.shape[1]:
        keys = np.partition(keys, keys.shape[1] - count, axis=1)[:, -count:]
    return np.sort(keys, axis=1)[:, ::-1]


@register("count_above", "cpu")
def count_above(x: BlockedLogits, limit: torch.Tensor) -> torch.Tensor:
    """Contract of the reference."""
    rows = len(limit)
    row, block = pairs((x.peaks > limit.unsqueeze(1)).numpy())
    above = np.count_nonzero(take(x, row, block).numpy() > limit.numpy()[row, None], axis=1)
    return torch.from_numpy(np.bincount(row, weights=above, minlength=rows).astype(np.int64))
