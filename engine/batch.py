"""From a step's plan to tensors: token ids, positions, slots, and the groups that attention works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Span
from kernels.attention import AttentionBatch, AttentionGroup

Ints = npt.NDArray[np.int64]

#: Padding (query rows times keys) that costs as much as one more group's calls: on two Xeon cores a gathered key takes
#: about 0.14 us, a group about 30 us.
GROUP_COST = 256


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a batch must know of the KV cache. `null_block` is never written and holds zeros."""

    block_size: int
    null_block: int
    kv_heads: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class Batch:
    """Inputs of one forward pass.

    Attributes:
        tokens, positions: [tokens] int64.
        attention: slots and groups.
        sample_rows: [samples] int64, rows whose logits are wanted; None where that is every row, in order.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sample_rows: torch.Tensor | None


@dataclass(slots=True)
class _Shape:
    """Per span: tokens of the pass, tokens before, tokens after, first row; and block tables, padded."""

    counts: Ints
    starts: Ints
    lengths: Ints
    rows: Ints
    tables: Ints


def build_batch(spans: list[Span], layout: CacheLayout) -> Batch:
    """Tensors for a pass over the spans, in their order; at least one span."""
    counts = np.array([span.count for span in spans], dtype=np.int64)
    starts = np.array([span.start for span in spans], dtype=np.int64)
    rows = np.cumsum(counts) - counts
    shape = _Shape(counts, starts, starts + counts, rows, _tables(spans, starts + counts, layout))
    tokens: list[int] = []
    for span in spans:
        tokens += span.sequence.tokens[span.start : span.start + span.count]
    positions = np.arange(len(tokens), dtype=np.int64) + np.repeat(starts - rows, counts)
    blocks = shape.tables[np.repeat(np.arange(len(spans)), counts), positions // layout.block_size]
    slots = blocks * layout.block_size + positions % layout.block_size
    groups = [_group(members, shape, layout) for members in _partition(shape)]
    samples = [int(rows[index] + span.count - 1) for index, span in enumerate(spans) if span.sample]
    wanted = None if len(samples) == len(tokens) else _to(np.array(samples, dtype=np.int64), layout)
    return Batch(
        tokens=_to(np.array(tokens, dtype=np.int64), layout),
        positions=_to(positions, layout),
        attention=AttentionBatch(_to(slots, layout), groups),
        sample_rows=wanted,
    )


def _tables(spans: list[Span], lengths: Ints, layout: CacheLayout) -> Ints:
    used = -(-lengths // layout.block_size)
    tables = np.full((len(spans), int(used.max())), layout.null_block, dtype=np.int64)
    for row, (span, blocks) in enumerate(zip(spans, used.tolist(), strict=True)):
        tables[row, :blocks] = span.sequence.block_table[:blocks]
    return tables


def _partition(shape: _Shape) -> list[Ints]:
    """Span indices by group, in order: decodes apart from chunks, and sizes apart where padding would cost more."""
    groups: list[Ints] = []
    for members in (np.flatnonzero(shape.counts == 1), np.flatnonzero(shape.counts > 1)):
        if len(members):
            area = shape.counts[members] * shape.lengths[members]
            groups += _split(members[np.argsort(-area, kind="stable")], shape)
    return [np.sort(group) for group in groups]


def _split(members: Ints, shape: _Shape) -> list[Ints]:
    """Cut a list that descends in area where that saves most, again and again."""
    # Padded area per span of the part from each index on; the first is that of the whole.
    queries = np.maximum.accumulate(shape.counts[members][::-1])[::-1]
    keys = np.maximum.accumulate(shape.lengths[members][::-1])[::-1]
    area = queries * keys
    saved = np.arange(len(members), 0, -1) * (area[0] - area)
    cut = int(saved.argmax())
    if saved[cut] <= GROUP_COST:
        return [members]
    return _split(members[:cut], shape) + _split(members[cut:], shape)


def _group(members: Ints, shape: _Shape, layout: CacheLayout) -> AttentionGroup:
    counts, lengths, rows = shape.counts[members], shape.lengths[members], shape.rows[members]
    batch, queries, keys = len(members), int(counts.max()), int(lengths.max())
    blocks = shape.tables[members, : -(-keys // layout.block_size)]
    group = AttentionGroup(
        batch=batch, queries=queries, blocks=_to(blocks.reshape(-1), layout), keys=keys, start=int(rows[0])
    )
    padded = bool((counts != queries).any())
    offsets = np.minimum(np.arange(queries), counts[:, None] - 1)  # [batch, queries], padding repeats the last row
    if padded or bool((np.diff(rows) != queries).any()):
        grid = rows[:, None] + offsets
        real = np.arange(queries) < counts[:, None]
        group.gather = _to(grid.reshape(-1), layout)
        group.rows = _to(grid[real], layout)
        group.scatter = _to(np.flatnonzero(real), layout) if padded else None
    group.mask = _mask(shape.starts[members, None] + offsets + 1, keys, layout)
    return group


def _mask(visible: Ints, keys: int, layout: CacheLayout) -> torch.Tensor | None:
    """Additive mask for the numbers of keys that may be seen, [batch, queries]; None if all see all."""
    batch, queries = visible.shape
    if bool((visible == keys).all()):
        return None
    hidden = torch.arange(keys, device=layout.device) >= _to(visible, layout).unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=layout.device).masked_fill_(hidden, float("-inf"))
    mask = mask.unsqueeze(1)  # [batch, 1, queries, keys]
    if queries == 1 or batch == 1:
        return mask
    # Chunks have their KV heads in the batch axis.
    return mask.expand(batch, layout.kv_heads, queries, keys).reshape(batch * layout.kv_heads, 1, queries, keys)


def _to(array: npt.NDArray[Any], layout: CacheLayout) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if layout.device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(layout.device, non_blocking=True)
