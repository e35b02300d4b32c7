"""Causal attention in pieces of fixed shapes: a tile of query rows against one chunk of keys.

Chunks are counted from a sequence's first key, whatever the pass begins with. A piece's scores, and its part of the
weighted sum, depend on its own rows and keys; the maximum over chunks is the same in any order; parts are added from
the first chunk on. A hidden key weighs exactly zero, so chunks behind a query's last key add exactly zero.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.attention import AttentionBatch
from kernels.invariant.attention_plan import CHUNK, AttentionPlan, Layout, Slab, plan_attention
from kernels.invariant.exponential import prove_exponential, weights_
from kernels.invariant.row_sum import row_sum
from kernels.invariant.tiles import Tensors, Tiled, agreeing, in_tiles, position_free
from kernels.ops import register

#: Query rows of a tile, and pieces of one call.
ROWS = (4, 8, 16, 32, 64)
PIECES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@register("paged_attention", "invariant")
def paged_attention(query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Contract of the reference; computed in float32."""
    tokens, heads, dim = query.shape
    _, block_size, _, kv_heads, _ = cache.shape
    pieces = proven_pieces(dim, cache.device, torch.get_num_threads())
    plan = batch.plan
    if not isinstance(plan, AttentionPlan):
        plan = batch.plan = plan_attention(batch, Layout(heads, kv_heads, block_size), pieces)
    query, cache = query.reshape(tokens * heads, dim), cache.view(-1, dim)
    results = [_attend(query, cache, slab, pieces[slab.rows], scale) for slab in plan.slabs]
    return torch.cat(results).index_select(0, plan.order).to(query.dtype).view(tokens, heads * dim)


def _attend(query: torch.Tensor, cache: torch.Tensor, slab: Slab, sizes: tuple[int, ...], scale: float) -> torch.Tensor:
    """Results of a slab's columns, [columns * rows, head_dim] float32."""
    used, dim = slab.chunks * slab.columns, query.shape[1]
    rows = query.index_select(0, slab.queries).float().mul_(scale).view(-1, slab.rows, dim)
    keys = cache.index_select(0, slab.keys).float().view(-1, CHUNK, dim)
    values = cache.index_select(0, slab.values).float().view(-1, CHUNK, dim)
    scores, top = Tiled(_scores, sizes)(rows, keys, slab.bound)
    highest = top.narrow(0, 0, used).view(slab.chunks, -1, slab.rows).amax(0)
    mixed, weight = Tiled(_mix, sizes)(scores, highest.index_select(0, slab.column), values)
    return _add_up(mixed, slab, dim) / _add_up(weight, slab, 1)


def _add_up(parts: torch.Tensor, slab: Slab, width: int) -> torch.Tensor:
    """[pieces, rows, width] -> [columns * rows, width], from the first chunk to the last."""
    first, *others = parts.view(-1, width).split(slab.columns * slab.rows)[: slab.chunks]
    total = first + 0.0  # a sum that starts at +0 never becomes -0, however many zeros follow
    for part in others:
        total.add_(part)
    return total


def _scores(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Tensors:
    """[pieces, rows, CHUNK], and each row's maximum, [pieces, rows]."""
    score = torch.bmm(query, key.transpose(1, 2))
    torch.minimum(score, bound, out=score)
    return score, score.amax(-1)


def _mix(score: torch.Tensor, highest: torch.Tensor, value: torch.Tensor) -> Tensors:
    """Values weighted by exp(score - highest), [pieces, rows, head_dim], and the sums of weights, [pieces, rows, 1].

    The scores are used up.
    """
    weight = weights_(score.sub_(highest.unsqueeze(-1)))
    return torch.bmm(weight, value), row_sum(weight)


@lru_cache(maxsize=64)
@torch.inference_mode()
def proven_pieces(dim: int, device: torch.device, threads: int) -> dict[int, tuple[int, ...]]:
    """By rows of a tile, ascending: numbers of pieces that may be computed in one call, all with equal bits.

    Args:
        dim: of a head.
        device: where.
        threads: of torch, now.

    Raises:
        ValueError: products of these shapes do not give the same bits twice, or exponentials depend on their place.
    """
    prove_exponential(device)
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
    return normal(pieces, rows, dim), bound, normal(pieces, CHUNK, dim), normal(pieces, CHUNK, dim)


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
