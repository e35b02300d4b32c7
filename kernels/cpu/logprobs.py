"""Log probabilities' parts, from the maxima of blocks; same contracts as the references."""

from __future__ import annotations

import math

import numpy as np
import torch

from kernels.blocked import BLOCK, BlockedLogits
from kernels.cpu.tempered import OFF, Tempered, pairs, take
from kernels.ops import register


@register("argmax", "cpu")
def argmax(x: BlockedLogits) -> torch.Tensor:
    """Contract of the reference."""
    block = x.peaks.argmax(-1).numpy()
    inside = take(x, np.arange(len(block)), block).argmax(-1)
    return inside.add_(torch.from_numpy(block), alpha=BLOCK)


@register("log_sum_exp", "cpu")
def log_sum_exp(x: BlockedLogits) -> torch.Tensor:
    """Contract of the reference."""
    rows = Tempered.of(x)
    logs = [math.log(each) for each in rows.masses().tolist()]
    return torch.tensor(logs, dtype=torch.float64) + torch.from_numpy(rows.shift())


@register("largest", "cpu")
def largest(x: BlockedLogits, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of the reference.

    The `count` best blocks have a logit each that is no less than the last of their maxima.
    """
    rows, blocks = x.peaks.shape
    limit = np.full(rows, OFF, dtype=np.float32)
    if count <= blocks:
        limit = np.sort(x.peaks.numpy(), axis=1)[:, -count]
    kept = Tempered.of(x).kept(limit)
    ids = np.empty((rows, count), dtype=np.int64)
    for some, values in kept.padded():
        order = np.argsort(-values, axis=1, kind="stable")[:, :count]
        ids[some] = kept.ids(some[:, None], order)
    found = torch.from_numpy(ids)
    return x.values.gather(1, found), found


@register("count_above", "cpu")
def count_above(x: BlockedLogits, limit: torch.Tensor) -> torch.Tensor:
    """Contract of the reference."""
    rows = len(limit)
    row, block = pairs((x.peaks > limit.unsqueeze(1)).numpy())
    above = np.count_nonzero(take(x, row, block).numpy() > limit.numpy()[row, None], axis=1)
    return torch.from_numpy(np.bincount(row, weights=above, minlength=rows).astype(np.int64))
