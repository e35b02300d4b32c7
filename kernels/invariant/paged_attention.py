"""Causal attention in pieces of fixed shapes: a tile of query rows against one chunk of keys.

Chunks are counted from a sequence's first key, whatever the pass begins with. A piece's scores, and its part of the
weighted sum, depend on its own rows and keys; the maximum over chunks is the same in any order; parts are added from
the first chunk on. A hidden key weighs exactly zero, so chunks behind a query's last key add exactly zero.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.attention import AttentionBatch, AttentionGroup
from kernels.invariant.attention_plan import CHUNK, AttentionPlan, Slab, plan_attention
from kernels.invariant.tiles import Tensors, Tiled, agreeing, in_tiles, position_free
from kernels.ops import register

#: Query rows of a tile, and pieces of one call.
ROWS = (4, 8, 16, 32, 64)
PIECES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)

_VECTOR = 16


@register("paged_attention", "invariant")
def paged_attention(query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Contract of the reference; computed in float32."""
    parts: list[torch.Tensor] = []
    first = 0
    for group in batch.groups:
        parts.append(_attend(query.narrow(0, first, group.rows), cache, group, scale))
        first += group.rows
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(query: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, scale: float) -> torch.Tensor:
    """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
    tokens, heads, dim = query.shape
    _, block_size, _, kv_heads, _ = cache.shape
    pieces = proven_pieces(dim, cache.device, torch.get_num_threads())
    plan = group.plan
    if not isinstance(plan, AttentionPlan):
        plan = group.plan = plan_attention(group, heads, kv_heads, block_size, pieces)
    scores, mix = Tiled(_scores, pieces[plan.rows]), Tiled(_mix, pieces[plan.rows])
    query = query.reshape(tokens * heads, dim)
    slots = cache.view(-1, 2, kv_heads, dim)
    results: list[torch.Tensor] = []
    for slab in plan.slabs:
        rows = query.index_select(0, slab.query_rows).float().mul_(scale).view(-1, plan.rows, dim)
        key, value = _keys_and_values(slots.index_select(0, slab.slots), slab)
        score, top = scores(rows, key, slab.bound)
        used = slab.chunks * slab.columns
        highest = top.narrow(0, 0, used).view(slab.chunks, slab.columns, plan.rows).amax(0)
        part = mix(score, highest.index_select(0, slab.column), value)[0]
        results.append(_add_up(part.narrow(0, 0, used).reshape(slab.chunks, slab.columns * plan.rows, -1), dim))
    return torch.cat(results).index_select(0, plan.order).to(query.dtype).view(tokens, heads * dim)


def _keys_and_values(kv: torch.Tensor, slab: Slab) -> tuple[torch.Tensor, torch.Tensor]:
    """[slots, 2, kv_heads, head_dim] -> keys [pieces, CHUNK, head_dim] and values [pieces, CHUNK, width].

    Behind its elements a value has ones, so that the weights are summed as the values are.
    """
    _, _, kv_heads, dim = kv.shape
    kv = kv.view(-1, CHUNK, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)  # [2, chunks, kv_heads, CHUNK, head_dim]
    chunks = kv.shape[1] * kv_heads
    size = chunks if slab.key_chunk is not None else len(slab.column)
    key = kv.new_empty((size, CHUNK, dim), dtype=torch.float32)
    value = kv.new_empty((size, CHUNK, _width(dim)), dtype=torch.float32)
    key.narrow(0, 0, chunks).view(kv.shape[1:]).copy_(kv[0])
    value.narrow(0, 0, chunks).view(*kv.shape[1:-1], -1).narrow(-1, 0, dim).copy_(kv[1])
    key.narrow(0, chunks, size - chunks).zero_()
    value.narrow(0, chunks, size - chunks).zero_()
    value.narrow(-1, dim, value.shape[-1] - dim).fill_(1.0)
    if slab.key_chunk is None:
        return key, value
    return key.index_select(0, slab.key_chunk), value.index_select(0, slab.key_chunk)


def _width(dim: int) -> int:
    """Elements of a value and at least a one, in whole vectors: other code may sum a product's odd last columns."""
    return dim + _VECTOR - dim % _VECTOR


def _add_up(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """[chunks, rows, width] -> [rows, head_dim]: sums of the chunks in order, divided by the sums of weights."""
    total = parts[0] + 0.0  # a sum that starts at +0 never becomes -0, however many zeros follow
    for part in parts[1:]:
        total.add_(part)
    return total.narrow(-1, 0, dim) / total.narrow(-1, dim, 1)


def _scores(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Tensors:
    """[pieces, rows, CHUNK], and each row's maximum, [pieces, rows]."""
    score = torch.bmm(query, key.transpose(1, 2))
    torch.minimum(score, bound, out=score)
    return score, score.amax(-1)


def _mix(score: torch.Tensor, highest: torch.Tensor, value: torch.Tensor) -> Tensors:
    """[pieces, rows, width]: values weighted by exp(score - highest). The scores are used up."""
    return (torch.bmm(score.sub_(highest.unsqueeze(-1)).exp_(), value),)


@lru_cache(maxsize=64)
@torch.inference_mode()
def proven_pieces(dim: int, device: torch.device, threads: int) -> dict[int, tuple[int, ...]]:
    """By rows of a tile, ascending: numbers of pieces that may be computed in one call, all with equal bits.

    Args:
        dim: of a head.
        device: where.
        threads: of torch, now.

    Raises:
        ValueError: products of these shapes do not give the same bits twice.
    """
    inputs = _random_pieces(dim, device)
    best: dict[int, tuple[int, ...]] = {}
    for base in reversed(ROWS):
        found = _company(inputs, base)
        if sum(map(len, found.values())) > sum(map(len, best.values())):
            best = found
        if all(best.get(rows) == PIECES for rows in ROWS):
            break
    if not best:
        raise ValueError(f"deterministic: attention with heads of {dim} does not give the same bits twice")
    return best


def _company(inputs: Tensors, base: int) -> dict[int, tuple[int, ...]]:
    """What agrees with tiles of `base` rows in calls of the fewest pieces."""
    cut = _cut(inputs, base, PIECES[-1] * ROWS[-1] // base)
    if not (position_free(_piece, cut, PIECES[0]) and _rows_are_free(cut)):
        return {}
    expected = in_tiles(_piece, cut, PIECES[0])
    found: dict[int, tuple[int, ...]] = {}
    for rows in ROWS:
        # The same rows in tiles of another height.
        wanted = tuple(x.reshape(-1, rows, *x.shape[2:]) for x in expected)
        if sizes := tuple(agreeing(_piece, _cut(inputs, rows, PIECES[-1]), wanted, PIECES)):
            found[rows] = sizes
    return found


def _random_pieces(dim: int, device: torch.device) -> Tensors:
    """Queries, bounds, keys and values of as many pieces as a call takes, with the most rows."""
    pieces, rows = PIECES[-1], ROWS[-1]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    seen = torch.randint(1, CHUNK + 1, (pieces, rows, 1), device=device, generator=generator)
    hidden = torch.arange(CHUNK, device=device) >= seen
    bound = torch.full(hidden.shape, torch.inf, device=device).masked_fill_(hidden, -torch.inf)
    return normal(pieces, rows, dim), bound, normal(pieces, CHUNK, dim), normal(pieces, CHUNK, _width(dim))


def _cut(inputs: Tensors, rows: int, pieces: int) -> Tensors:
    """The first of them as so many pieces with tiles of so many rows."""
    times = ROWS[-1] // rows
    query, bound, key, value = (x.narrow(0, 0, pieces // times) for x in inputs)
    query, bound = query.reshape(pieces, rows, -1), bound.reshape(pieces, rows, CHUNK)
    return query, bound, key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)


def _piece(query: torch.Tensor, bound: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    """Both products, as if the chunk were the only one."""
    score, top = _scores(query, key, bound)
    return score.clone(), *_mix(score, top, value)


def _rows_are_free(inputs: Tensors) -> bool:
    """Whether a row gives the same bits at each place in its tile."""
    query, bound, key, value = (x.narrow(0, 0, PIECES[0]) for x in inputs)
    expected = _piece(query, bound, key, value)
    for shift in range(1, query.shape[1]):
        rolled = _piece(query.roll(shift, 1), bound.roll(shift, 1), key, value)
        if not all(torch.equal(x.roll(-shift, 1), y) for x, y in zip(rolled, expected, strict=True)):
            return False
    return True
