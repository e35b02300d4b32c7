"""How a batch's attention falls into programs: worked out once a step on the host, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention import DECODE_CUT, AttentionBatch, FixedDecode
from kernels.transfer import to_device
from kernels.triton.launch import cdiv, power_of_2

Ints = npt.NDArray[np.int64]

#: Keys that one program of a decode reads. They are cut by the sequence's own length alone, so that its sum has the
#: same order in every batch.
SPLIT_KEYS = DECODE_CUT
#: Most cuts of one sequence; a longer one has longer cuts.
MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sequences with one query token each.

    Attributes:
        rows: [4, sequences] int32: the token's row, where the block table begins, keys, keys of a cut.
        sequences: how many.
        splits: most cuts of a sequence.
    """

    rows: torch.Tensor
    sequences: int
    splits: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Tiles of query rows of sequences with several query tokens; those with most keys first.

    A sequence's query rows are the query heads of one KV head, of one token after the other.

    Attributes:
        rows: [5, tiles] int32: the sequence's first row, where its block table begins, keys, query tokens, and the
            tile's first query row.
        tiles: how many.
    """

    rows: torch.Tensor
    tiles: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Block tables end to end, [blocks] int64, and the programs over them."""

    blocks: torch.Tensor
    decode: DecodePlan | None
    prefill: PrefillPlan | None


def plan_attention(
    batch: AttentionBatch, per_kv_head: int, tile_rows: int, num_blocks: int, window: int | None
) -> AttentionPlan:
    """Cut a batch into programs.

    Args:
        batch: of one step.
        per_kv_head: query heads of one KV head.
        tile_rows: query rows of a prefill tile.
        num_blocks: of the cache; a block table cannot lead out of it.
        window: keys that a query sees at most; None: all before it.
    """
    counts = np.concatenate([group.counts for group in batch.groups])
    lengths = np.concatenate([group.lengths for group in batch.groups])
    tables = _table_starts(batch)
    first_rows = np.cumsum(counts) - counts
    decodes, chunks = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    decode_rows = _decodes(first_rows[decodes], tables[decodes], lengths[decodes], window)
    tiles = -(-counts[chunks] * per_kv_head // tile_rows)
    of_tile = np.repeat(chunks, tiles)
    offsets = (np.arange(len(of_tile)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    order = np.argsort(-(lengths[of_tile] - counts[of_tile] + offsets // per_kv_head), kind="stable")
    of_tile, offsets = of_tile[order], offsets[order]
    tile_table = np.stack((first_rows[of_tile], tables[of_tile], lengths[of_tile], counts[of_tile], offsets))
    # One copy for all: each has its price.
    device = batch.groups[0].blocks.device
    both = to_device(np.concatenate((decode_rows.reshape(-1), tile_table.reshape(-1))).astype(np.int32), device)
    cut = decode_rows.size
    blocks = torch.cat([group.blocks for group in batch.groups]).clamp_(0, num_blocks - 1)
    splits = int((-(-_span(lengths[decodes], window) // decode_rows[3])).max(initial=1))
    return AttentionPlan(
        blocks=blocks,
        decode=DecodePlan(both[:cut].view(4, -1), len(decodes), max(1, splits)) if len(decodes) else None,
        prefill=PrefillPlan(both[cut:].view(5, -1), len(of_tile)) if len(of_tile) else None,
    )


def plan_fixed(fixed: FixedDecode, window: int | None) -> AttentionPlan:
    """Programs of a decode whose lengths the device alone knows: each sequence has the cuts that the longest may have.

    A program whose cut lies behind its sequence's end does nothing. Cuts are those that `plan_attention` makes.
    """
    batch, width = fixed.tables.shape
    lengths = fixed.lengths.long()
    span = lengths if window is None else lengths.clamp(max=window)
    most = fixed.most if window is None else min(fixed.most, window)
    keys, size = torch.full_like(lengths, SPLIT_KEYS), SPLIT_KEYS
    while size * MOST_SPLITS < most:
        keys = torch.where(span > size * MOST_SPLITS, 2 * size, keys)
        size *= 2
    each = torch.arange(batch, device=lengths.device)
    rows = torch.stack((each, each * width, lengths, keys)).int()
    splits = min(MOST_SPLITS, cdiv(most, SPLIT_KEYS))
    return AttentionPlan(fixed.tables.view(-1), DecodePlan(rows, batch, splits), None)


def _decodes(rows: Ints, tables: Ints, lengths: Ints, window: int | None) -> Ints:
    least = -(-_span(lengths, window) // MOST_SPLITS)
    keys = np.array([max(SPLIT_KEYS, power_of_2(int(each))) for each in least], dtype=np.int64)
    return np.stack((rows, tables, lengths, keys))


def _span(lengths: Ints, window: int | None) -> Ints:
    return lengths if window is None else np.minimum(lengths, window)


def _table_starts(batch: AttentionBatch) -> Ints:
    """[sequences]: where each block table begins when all are end to end."""
    tables: list[Ints] = []
    first = 0
    for group in batch.groups:
        size = len(group.blocks)
        tables.append(first + np.arange(group.batch) * (size // group.batch))
        first += size
    return np.concatenate(tables)
