"""What paged attention needs to know of a batch: made once a step, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class AttentionGroup:
    """Sequences of similar length that one call attends for, padded to a common shape.

    Attributes:
        batch: sequences.
        queries: most query tokens of a sequence.
        blocks: [batch * blocks_each] int64, block tables end to end, padded with the cache's null block.
        mask: added to the scores, -inf where a query may not look. Decode groups (`queries` is 1): [batch, 1, 1,
            keys]. Others: [batch * kv_heads, 1, queries, keys], or [1, 1, queries, keys] for a batch of 1. None where
            everything may be seen.
        keys: keys that are attended to: `blocks_each * block_size`, or fewer.
        gather: [batch * queries] int64, the row of each padded query; None where the group's rows are the rows
            `start` to `start + batch * queries` in order.
        scatter: [rows of the group] int64 positions in the padded queries, in the order of `rows`; None without
            padding.
        rows: [rows of the group] int64, where results go; None with `gather` None.
        start: first row, where rows are in order.
    """

    batch: int
    queries: int
    blocks: torch.Tensor
    keys: int
    mask: torch.Tensor | None = None
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    start: int = 0


@dataclass(slots=True)
class AttentionBatch:
    """All groups of a mixed batch, decodes and prefill chunks.

    Attributes:
        slot_mapping: [tokens] int64, where the KV cache takes each token.
        groups: a partition of the batch's rows.
    """

    slot_mapping: torch.Tensor
    groups: list[AttentionGroup] = field(default_factory=list)
