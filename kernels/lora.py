"""What the LoRA operation needs: adapters of one layer in slots, and which rows of a batch use which slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True)
class LoraLayer:
    """Slots of one linear layer, which may be several modules fused, its parts.

    Attributes:
        a: [slots, parts, rank, inputs]; rows above an adapter's own rank, and parts that it lacks, are zeros.
        b: [slots, rank, outputs], scaled; zeros likewise.
        widths: outputs of each part; together they are all outputs.
    """

    a: torch.Tensor
    b: torch.Tensor
    widths: tuple[int, ...]


@dataclass(slots=True)
class LoraBatch:
    """Rows of a batch by slot. A batch without any row of an adapter has none of this.

    Attributes:
        slots: [tokens] int32, slot of each row, -1 for the base model.
        active: [groups] int64, the slots that occur.
        rank: largest rank among them.
        gather: [groups * size] int64, rows of each group one after the other, padded with any row.
        valid: [rows] int64, positions in `gather` that are not padding.
        rows: [rows] int64, the row at each of `valid`.
    """

    slots: torch.Tensor
    active: torch.Tensor
    rank: int
    gather: torch.Tensor
    valid: torch.Tensor
    rows: torch.Tensor


def lora_batch(slots: Sequence[int], ranks: Sequence[int], device: torch.device) -> LoraBatch | None:
    """The batch whose rows use these slots; None where all are -1.

    Args:
        slots: of each row.
        ranks: of the adapter in each slot.
        device: of the model.
    """
    of_rows = np.asarray(slots, dtype=np.int32)
    rows = np.flatnonzero(of_rows >= 0)
    if not len(rows):
        return None
    rows = rows[np.argsort(of_rows[rows], kind="stable")]
    active, counts = np.unique(of_rows[rows], return_counts=True)
    size = int(counts.max())
    firsts = np.cumsum(counts) - counts
    offsets = np.arange(len(rows)) - np.repeat(firsts, counts)
    valid = np.repeat(np.arange(len(active)) * size, counts) + offsets
    gather = np.full(len(active) * size, rows[0])
    gather[valid] = rows
    return LoraBatch(
        slots=torch.from_numpy(of_rows).to(device),
        active=torch.from_numpy(active.astype(np.int64)).to(device),
        rank=max(ranks[slot] for slot in active),
        gather=torch.from_numpy(gather).to(device),
        valid=torch.from_numpy(valid).to(device),
        rows=torch.from_numpy(rows).to(device),
    )
