"""How a group's attention falls into pieces of fixed shapes: worked out once a step, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention import AttentionGroup
from kernels.invariant.tiles import cover

Ints = npt.NDArray[np.int64]

#: Keys of a chunk, counted from a sequence's first: partial results are of one chunk each.
CHUNK = 64


@dataclass(slots=True)
class Slab:
    """Pieces that are computed together: one per chunk and column, in this order, then padding.

    A column is a tile of query rows of one sequence and one KV head.

    Attributes:
        chunks: of keys, from the first on.
        columns: query tiles times KV heads.
        query_rows: [pieces * rows] int64, into the group's queries as [tokens * heads, head_dim].
        slots: [chunks * sequences * CHUNK] int64, of the KV cache. Behind a sequence's end its last one is repeated.
        key_chunk: [pieces] int64, into [chunks * sequences * kv_heads]; None where piece and chunk are one to one.
        column: [pieces] int64, the column of each piece.
        bound: [pieces, rows, CHUNK] float32, inf for the keys that a query sees and -inf for the others.
    """

    chunks: int
    columns: int
    query_rows: torch.Tensor
    slots: torch.Tensor
    key_chunk: torch.Tensor | None
    column: torch.Tensor
    bound: torch.Tensor


@dataclass(slots=True)
class AttentionPlan:
    """Attributes:
    rows: query rows of a tile: query heads of one KV head, of one token after the other.
    slabs: together all tiles of the group.
    order: [tokens * heads] int64, where each query's result is among those of the slabs.
    """

    rows: int
    slabs: list[Slab]
    order: torch.Tensor


@dataclass(slots=True)
class _Tiles:
    """Query tiles of a group, those with most chunks first.

    Attributes:
        sequence, chunks: [tiles].
        token, head, visible: [tiles, rows]: token of the group, head within its KV head, keys that it sees.
    """

    sequence: Ints
    chunks: Ints
    token: Ints
    head: Ints
    visible: Ints


def plan_attention(
    group: AttentionGroup, heads: int, kv_heads: int, block_size: int, pieces: dict[int, tuple[int, ...]]
) -> AttentionPlan:
    """Cut a group into slabs.

    Args:
        group: of a batch.
        heads, kv_heads: query heads and KV heads.
        block_size: of the cache.
        pieces: by rows of a tile, ascending: how many pieces may be computed in one call.
    """
    per_kv_head = heads // kv_heads
    most = int(group.counts.max()) * per_kv_head
    rows = next((rows for rows in pieces if rows >= most), max(pieces))
    tiles = _query_tiles(group, per_kv_head, rows)
    order = np.empty(group.rows * heads, dtype=np.int64)
    slabs: list[Slab] = []
    first = done = 0
    while first < len(tiles.sequence):
        chunks = int(tiles.chunks[first])
        members = slice(first, first + max(1, pieces[rows][-1] // (chunks * kv_heads)))
        queries = _query_rows(tiles, members, heads, kv_heads)
        order[queries.reshape(-1)] = np.arange(done, done + queries.size)
        slabs.append(_slab(tiles, members, queries, group, block_size, pieces[rows]))
        first, done = members.stop, done + queries.size
    return AttentionPlan(rows, slabs, _to(order, group))


def _query_tiles(group: AttentionGroup, per_kv_head: int, rows: int) -> _Tiles:
    size = group.counts * per_kv_head
    tiles = -(-size // rows)
    sequence = np.repeat(np.arange(group.batch), tiles)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    # Behind a sequence's last row it is repeated.
    row = np.minimum(tile[:, None] * rows + np.arange(rows), size[sequence, None] - 1)
    token, head = np.divmod(row, per_kv_head)
    visible = (group.lengths - group.counts)[sequence, None] + token + 1
    chunks = -(-visible[:, -1] // CHUNK)
    order = np.argsort(-chunks, kind="stable")
    token += (np.cumsum(group.counts) - group.counts)[sequence, None]
    return _Tiles(sequence[order], chunks[order], token[order], head[order], visible[order])


def _query_rows(tiles: _Tiles, members: slice, heads: int, kv_heads: int) -> Ints:
    """[tiles, kv_heads, rows], into [tokens * heads]."""
    first_heads = np.arange(kv_heads)[:, None] * (heads // kv_heads)
    return tiles.token[members, None] * heads + tiles.head[members, None] + first_heads


def _slab(
    tiles: _Tiles, members: slice, queries: Ints, group: AttentionGroup, block_size: int, sizes: tuple[int, ...]
) -> Slab:
    chunks = int(tiles.chunks[members.start])
    count, kv_heads, rows = queries.shape
    columns = count * kv_heads
    used = chunks * columns
    pieces = sum(cover(sizes, used))
    column = np.zeros(pieces, dtype=np.int64)
    column[:used] = np.tile(np.arange(columns), chunks)
    sequences, which = np.unique(tiles.sequence[members], return_inverse=True)
    key_chunk: Ints | None = None
    if len(sequences) == count:
        sequences = tiles.sequence[members]
    else:
        key_chunk = np.zeros(pieces, dtype=np.int64)
        own = which[:, None] * kv_heads + np.arange(kv_heads)
        key_chunk[:used] = (np.arange(chunks)[:, None, None] * (len(sequences) * kv_heads) + own).reshape(-1)
    seen = np.zeros((pieces, rows), dtype=np.int64)
    visible = tiles.visible[members, None] - np.arange(chunks)[:, None, None, None] * CHUNK
    seen[:used] = np.broadcast_to(visible, (chunks, count, kv_heads, rows)).reshape(used, rows)
    hidden = torch.arange(CHUNK, device=group.blocks.device) >= _to(seen, group).unsqueeze(-1)
    return Slab(
        chunks=chunks,
        columns=columns,
        query_rows=_to(queries.reshape(columns, rows)[column].reshape(-1), group),
        slots=_slots(group, sequences, chunks, block_size),
        key_chunk=None if key_chunk is None else _to(key_chunk, group),
        column=_to(column, group),
        bound=torch.full(hidden.shape, torch.inf, device=hidden.device).masked_fill_(hidden, -torch.inf),
    )


def _slots(group: AttentionGroup, sequences: Ints, chunks: int, block_size: int) -> torch.Tensor:
    position = np.arange(chunks * CHUNK).reshape(chunks, 1, CHUNK)
    position = np.minimum(position, group.lengths[sequences, None] - 1)  # [chunks, sequences, CHUNK]
    blocks_each = len(group.blocks) // group.batch
    block = _to((sequences[:, None] * blocks_each + position // block_size).reshape(-1), group)
    return group.blocks.index_select(0, block).mul_(block_size).add_(_to((position % block_size).reshape(-1), group))


def _to(array: Ints, group: AttentionGroup) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(group.blocks.device)
