"""How a batch's attention falls into pieces of fixed shapes: worked out once a step, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention import AttentionBatch
from kernels.invariant.tiles import cover

Ints = npt.NDArray[np.int64]

#: Keys of a chunk, counted from a sequence's first: partial results are of one chunk each.
CHUNK = 64

#: Query rows times chunks of padding that cost as much as one more slab's calls.
SLAB_COST = 128


@dataclass(frozen=True, slots=True)
class Layout:
    """Heads and KV heads of the model, tokens per block of the cache."""

    heads: int
    kv_heads: int
    block_size: int


@dataclass(slots=True)
class Slab:
    """Pieces that are computed together: one per chunk and column, in this order, then padding.

    A column is a tile of query rows of one sequence and one KV head.

    Attributes:
        rows: of a tile: query heads of one KV head, of one token after the other.
        chunks: of keys, from the first on.
        columns: query tiles times KV heads.
        column: [pieces] int64, the column of each piece.
        queries: [pieces * rows] int64, into [tokens * heads].
        keys, values: [pieces * CHUNK] int64, into [slots * 2 * kv_heads]. Behind a sequence's end its last key and
            value are repeated.
        bound: [pieces, rows, CHUNK] float32, inf for the keys that a query sees and -inf for the others.
    """

    rows: int
    chunks: int
    columns: int
    column: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    bound: torch.Tensor


@dataclass(slots=True)
class AttentionPlan:
    """Slabs, and where each query's result is among those of all slabs: [tokens * heads] int64."""

    slabs: list[Slab]
    order: torch.Tensor


@dataclass(slots=True)
class _Sequences:
    """Of a whole batch, in the order of its rows.

    Attributes:
        counts, lengths: [sequences], query tokens and keys.
        tables: [sequences], where each block table begins in `blocks`.
        blocks: block tables end to end, on the device.
    """

    counts: Ints
    lengths: Ints
    tables: Ints
    blocks: torch.Tensor


@dataclass(slots=True)
class _Tiles:
    """Query tiles of one height, those with most chunks first.

    Attributes:
        sequence, chunks: [tiles].
        token, head, visible: [tiles, rows]: token of the batch, head within its KV head, keys that it sees.
    """

    sequence: Ints
    chunks: Ints
    token: Ints
    head: Ints
    visible: Ints


def plan_attention(batch: AttentionBatch, layout: Layout, pieces: dict[int, tuple[int, ...]]) -> AttentionPlan:
    """Cut a batch into slabs.

    Args:
        batch: of one step.
        layout: of model and cache.
        pieces: by rows of a tile, ascending: how many pieces may be computed in one call.
    """
    sequences = _sequences(batch)
    per_kv_head = layout.heads // layout.kv_heads
    heights = np.array(list(pieces))
    fitting = np.searchsorted(heights, sequences.counts * per_kv_head)
    height = heights[np.minimum(fitting, len(heights) - 1)]
    order = np.empty(int(sequences.counts.sum()) * layout.heads, dtype=np.int64)
    slabs: list[Slab] = []
    done = 0
    for rows in np.unique(height).tolist():
        tiles = _tiles(sequences, np.flatnonzero(height == rows), per_kv_head, rows)
        work = tiles.chunks * layout.kv_heads
        for members in _split(work, 0, len(work), pieces[rows][-1], SLAB_COST // rows):
            queries = _queries(tiles, members, layout)
            order[queries.reshape(-1)] = np.arange(done, done + queries.size)
            slabs.append(_slab(tiles, members, queries, sequences, layout, pieces[rows]))
            done += queries.size
    return AttentionPlan(slabs, _to(order, sequences.blocks))


def _sequences(batch: AttentionBatch) -> _Sequences:
    tables: list[Ints] = []
    first = 0
    for group in batch.groups:
        size = len(group.blocks)
        tables.append(np.arange(first, first + size, size // group.batch))
        first += size
    return _Sequences(
        counts=np.concatenate([group.counts for group in batch.groups]),
        lengths=np.concatenate([group.lengths for group in batch.groups]),
        tables=np.concatenate(tables),
        blocks=torch.cat([group.blocks for group in batch.groups]),
    )


def _tiles(sequences: _Sequences, members: Ints, per_kv_head: int, rows: int) -> _Tiles:
    counts = sequences.counts[members]
    tiles = -(-counts * per_kv_head // rows)
    sequence = np.repeat(members, tiles)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    # Behind a sequence's last row it is repeated.
    last = sequences.counts[sequence, None] * per_kv_head - 1
    token, head = np.divmod(np.minimum(tile[:, None] * rows + np.arange(rows), last), per_kv_head)
    visible = (sequences.lengths - sequences.counts)[sequence, None] + token + 1
    chunks = -(-visible[:, -1] // CHUNK)
    order = np.argsort(-chunks, kind="stable")
    token += (np.cumsum(sequences.counts) - sequences.counts)[sequence, None]
    return _Tiles(sequence[order], chunks[order], token[order], head[order], visible[order])


def _split(work: Ints, first: int, end: int, most: int, slab_cost: int) -> list[slice]:
    """Cut tiles whose pieces descend where that saves most padding, again and again, and where there are too many."""
    saved = np.arange(end - first, 0, -1) * (work[first] - work[first:end])
    cut = first + int(saved.argmax())
    if saved[cut - first] <= slab_cost:
        together = max(1, most // int(work[first]))
        return [slice(at, min(at + together, end)) for at in range(first, end, together)]
    return _split(work, first, cut, most, slab_cost) + _split(work, cut, end, most, slab_cost)


def _queries(tiles: _Tiles, members: slice, layout: Layout) -> Ints:
    """[tiles, kv_heads, rows], into [tokens * heads]."""
    first_heads = np.arange(layout.kv_heads)[:, None] * (layout.heads // layout.kv_heads)
    return tiles.token[members, None] * layout.heads + tiles.head[members, None] + first_heads


def _slab(
    tiles: _Tiles, members: slice, queries: Ints, sequences: _Sequences, layout: Layout, sizes: tuple[int, ...]
) -> Slab:
    chunks = int(tiles.chunks[members.start])
    count, kv_heads, rows = queries.shape
    used = chunks * count * kv_heads
    pieces = sum(cover(sizes, used))
    column = np.zeros(pieces, dtype=np.int64)
    column[:used] = np.tile(np.arange(count * kv_heads), chunks)
    seen = np.zeros((pieces, rows), dtype=np.int64)
    visible = tiles.visible[members, None] - np.arange(chunks)[:, None, None, None] * CHUNK
    seen[:used] = np.broadcast_to(visible, (chunks, count, kv_heads, rows)).reshape(used, rows)
    device = sequences.blocks.device
    hidden = torch.arange(CHUNK, device=device) >= _to(seen, sequences.blocks).unsqueeze(-1)
    slots = _slots(sequences, tiles.sequence[members], chunks, layout.block_size)  # [chunks, tiles, CHUNK]
    keys = slots.unsqueeze(2) * (2 * kv_heads) + torch.arange(kv_heads, device=device).unsqueeze(-1)
    keys = torch.cat((keys.view(used, CHUNK), keys.view(used, CHUNK)[:1].expand(pieces - used, CHUNK))).view(-1)
    return Slab(
        rows=rows,
        chunks=chunks,
        columns=count * kv_heads,
        column=_to(column, sequences.blocks),
        queries=_to(queries.reshape(-1, rows)[column].reshape(-1), sequences.blocks),
        keys=keys,
        values=keys + kv_heads,
        bound=torch.full(hidden.shape, torch.inf, device=device).masked_fill_(hidden, -torch.inf),
    )


def _slots(sequences: _Sequences, members: Ints, chunks: int, block_size: int) -> torch.Tensor:
    position = np.arange(chunks * CHUNK).reshape(chunks, 1, CHUNK)
    position = np.minimum(position, sequences.lengths[members, None] - 1)  # [chunks, tiles, CHUNK]
    block, offset = np.divmod(position, block_size)
    block = _to(block + sequences.tables[members, None], sequences.blocks)
    return sequences.blocks[block].mul_(block_size).add_(_to(offset, sequences.blocks))


def _to(array: Ints, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
