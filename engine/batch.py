"""From a step's plan to tensors: token ids, positions, slots, and the groups that attention works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Span
from kernels.attention import AttentionBatch, AttentionGroup
from kernels.transfer import to_device

Ints = npt.NDArray[np.int64]

#: Padding (query rows times keys) that costs as much as one more group's calls: on two Xeon cores a gathered key takes
#: about 0.14 us, a group about 30 us.
GROUP_COST = 256


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a batch must know of the KV cache. `null_block` is nobody's: padding points there, and is finite.

    `grouped`: attention wants groups of similar sizes, with masks; else all sequences are one group without.
    `put` brings what a batch is described by to the device, if not each array by itself.
    """

    block_size: int
    null_block: int
    kv_heads: int
    dtype: torch.dtype
    device: torch.device
    grouped: bool = True
    put: Callable[[Ints], torch.Tensor] | None = None


@dataclass(slots=True)
class Batch:
    """Inputs of one forward pass.

    Attributes:
        order: indices of the spans, as their rows follow each other.
        tokens, positions: [tokens] int64.
        attention: slots and groups.
        sample_rows: [samples] on the host, the last rows of the spans that sample, in the order of the spans; None
            where that is every row as it stands.
    """

    order: list[int]
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sample_rows: Ints | None


@dataclass(slots=True)
class _Shape:
    """Per span: tokens of the pass, tokens before, tokens after; and block tables, padded."""

    counts: Ints
    starts: Ints
    lengths: Ints
    tables: Ints


def build_batch(spans: list[Span], layout: CacheLayout) -> Batch:
    """Tensors for a pass over at least one span.

    Rows are ordered so that each attention group's are neighbours, and in one group those of each adapter;
    `sample_rows` follows the order of the spans. A token that a pass under way will give is 0 here.
    """
    counts = np.array([span.count for span in spans], dtype=np.int64)
    starts = np.array([span.start for span in spans], dtype=np.int64)
    members = _partition(counts, starts + counts) if layout.grouped else [_by_adapter(spans)]
    order = np.concatenate(members)
    counts, starts = counts[order], starts[order]
    ordered = [spans[index] for index in order]
    shape = _Shape(counts, starts, starts + counts, block_tables(ordered, starts + counts, layout))
    rows = np.cumsum(counts) - counts
    tokens: list[int] = []
    for span in ordered:
        known = span.sequence.tokens[span.start : span.start + span.count]
        tokens += known or [0]
    positions = np.arange(len(tokens), dtype=np.int64) + np.repeat(starts - rows, counts)
    blocks = shape.tables[np.repeat(np.arange(len(spans)), counts), positions // layout.block_size]
    slots = blocks * layout.block_size + positions % layout.block_size
    return Batch(
        order=order.tolist(),
        tokens=_to(np.array(tokens, dtype=np.int64), layout),
        positions=_to(positions, layout),
        attention=AttentionBatch(_to(slots, layout), _groups([len(group) for group in members], shape, layout)),
        sample_rows=_sample_rows(spans, order, rows + counts - 1, len(tokens)),
    )


def _by_adapter(spans: list[Span]) -> Ints:
    return np.argsort([span.sequence.adapter_slot for span in spans], kind="stable")


def _sample_rows(spans: list[Span], order: Ints, last_rows: Ints, tokens: int) -> Ints | None:
    last_of_span = np.empty_like(last_rows)
    last_of_span[order] = last_rows
    rows = last_of_span[[span.sample for span in spans]]
    if len(rows) == tokens and bool((np.diff(rows) == 1).all()):
        return None
    return rows


def block_tables(spans: list[Span], lengths: Ints, layout: CacheLayout) -> Ints:
    """[spans, blocks of the longest], padded with the null block."""
    used = -(-lengths // layout.block_size)
    tables = np.full((len(spans), int(used.max())), layout.null_block, dtype=np.int64)
    for row, (span, blocks) in enumerate(zip(spans, used.tolist(), strict=True)):
        tables[row, :blocks] = span.sequence.block_table[:blocks]
    return tables


def _partition(counts: Ints, lengths: Ints) -> list[Ints]:
    """Span indices by group: decodes apart from chunks, and sizes apart where padding would cost more than calls."""
    groups: list[Ints] = []
    for members in (np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)):
        if len(members):
            area = counts[members] * lengths[members]
            groups += _split(members[np.argsort(-area, kind="stable")], counts, lengths)
    return [np.sort(group) for group in groups]


def _split(members: Ints, counts: Ints, lengths: Ints) -> list[Ints]:
    """Cut a list that descends in area where that saves most padding, again and again."""
    # What each span from an index on takes if a group begins there; the first is that of the whole list.
    queries = np.maximum.accumulate(counts[members][::-1])[::-1]
    keys = np.maximum.accumulate(lengths[members][::-1])[::-1]
    area = queries * keys
    saved = np.arange(len(members), 0, -1) * (area[0] - area)
    cut = int(saved.argmax())
    if saved[cut] <= GROUP_COST:
        return [members]
    return _split(members[:cut], counts, lengths) + _split(members[cut:], counts, lengths)


def _groups(sizes: list[int], shape: _Shape, layout: CacheLayout) -> list[AttentionGroup]:
    groups: list[AttentionGroup] = []
    first = 0
    for size in sizes:
        groups.append(_group(slice(first, first + size), shape, layout))
        first += size
    return groups


def _group(members: slice, shape: _Shape, layout: CacheLayout) -> AttentionGroup:
    counts, lengths = shape.counts[members], shape.lengths[members]
    batch, queries, keys = len(counts), int(counts.max()), int(lengths.max())
    blocks = shape.tables[members, : -(-keys // layout.block_size)]
    group = AttentionGroup(
        batch=batch,
        queries=queries,
        rows=int(counts.sum()),
        blocks=_to(blocks.reshape(-1), layout),
        keys=keys,
        counts=counts,
        lengths=lengths,
    )
    if not layout.grouped:
        return group
    offsets = np.minimum(np.arange(queries), counts[:, None] - 1)  # [batch, queries], padding repeats the last row
    group.mask = _mask(shape.starts[members, None] + offsets + 1, keys, layout)
    if group.rows != batch * queries:
        first_rows = np.cumsum(counts) - counts
        group.pad = _to((first_rows[:, None] + offsets).reshape(-1), layout)
        group.unpad = _to(np.flatnonzero(np.arange(queries) < counts[:, None]), layout)
    return group


def _mask(visible: Ints, keys: int, layout: CacheLayout) -> torch.Tensor | None:
    """Additive mask for the numbers of keys that may be seen, [batch, queries]; None if all see all."""
    batch, queries = visible.shape
    if bool((visible == keys).all()):
        return None
    hidden = torch.arange(keys, device=layout.device) >= to_device(visible, layout.device).unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=layout.device).masked_fill_(hidden, float("-inf"))
    mask = mask.unsqueeze(1)  # [batch, 1, queries, keys]
    if queries == 1 or batch == 1:
        return mask
    # Chunks have their KV heads in the batch axis.
    return mask.expand(batch, layout.kv_heads, queries, keys).reshape(batch * layout.kv_heads, 1, queries, keys)


def _to(array: Ints, layout: CacheLayout) -> torch.Tensor:
    return to_device(array, layout.device) if layout.put is None else layout.put(array)
