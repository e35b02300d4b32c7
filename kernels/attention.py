"""What paged attention needs to know of a batch: made once a step, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch


@dataclass(slots=True)
class AttentionGroup:
    """Sequences of similar size that one call attends for, padded to a common shape.

    Attributes:
        batch: sequences.
        queries: most query tokens of a sequence.
        rows: query tokens of all its sequences; the groups' rows follow each other in the batch.
        blocks: [batch * blocks_each] int64, block tables end to end, padded with the cache's null block.
        keys: most keys of a sequence.
        mask: added to the scores, -inf where a query may not look. Decode groups (`queries` is 1): [batch, 1, 1,
            keys]. Others: [batch * kv_heads, 1, queries, keys], or [1, 1, queries, keys] for a batch of 1. None where
            everything may be seen.
        pad: [batch * queries] int64, the group's row for each padded query; None where nothing is padded.
        unpad: [rows] int64, the padded query of each row.
        counts: [batch] on the host, query tokens of each sequence, the last of its keys.
        lengths: [batch] on the host, keys of each sequence.
    """

    batch: int
    queries: int
    rows: int
    blocks: torch.Tensor
    keys: int
    counts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    mask: torch.Tensor | None = None
    pad: torch.Tensor | None = None
    unpad: torch.Tensor | None = None


#: Keys that a backend reads at once of a decode whose keys it cuts: a decode of no more needs no second launch.
DECODE_CUT = 256


@dataclass(slots=True)
class FixedDecode:
    """Sequences with one query token each, described on the device alone: a recorded pass reads it anew each time.

    The host promises that lengths are within the tables, and that the entries which belong to keys are blocks of the
    cache. What lies behind those is never used.

    Attributes:
        lengths: [batch] int64 or int32, keys of each, at least 1.
        tables: [batch, blocks] int64, contiguous, block tables.
        most: keys of a sequence at most.
    """

    lengths: torch.Tensor
    tables: torch.Tensor
    most: int


@dataclass(slots=True)
class AttentionBatch:
    """All groups of a mixed batch, decodes and prefill chunks; or, in their place, a fixed decode.

    Attributes:
        slot_mapping: [tokens] int64, where the KV cache takes each token.
        groups: in the order of their rows; together all rows.
        fixed: a row for each sequence; the references and Triton serve it.
        plan: what a backend works out in the first layer for all layers.
    """

    slot_mapping: torch.Tensor
    groups: list[AttentionGroup] = field(default_factory=list)
    fixed: FixedDecode | None = None
    plan: object = None
