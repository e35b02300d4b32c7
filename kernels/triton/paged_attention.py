"""Causal attention over block tables: checks, launches, and what a batch's layers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.attention import AttentionBatch, FixedDecode
from kernels.ops import register
from kernels.triton.attention_kernels import decode_kernel, merge_kernel, prefill_kernel
from kernels.triton.attention_plan import MOST_SPLITS, AttentionPlan, plan_attention, plan_fixed
from kernels.triton.attention_tiles import decode_tile, prefill_tile
from kernels.triton.launch import (
    FLOAT8,
    FLOATS,
    check,
    check_tensor,
    dot_dtype,
    has_float8,
    power_of_2,
    target_of,
)

BLOCK_SIZES = (16, 32)
MOST_HEADS_PER_KV_HEAD = 64
_LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class _Plans:
    """Of one batch, by window and rows of a tile: layers may differ in their window."""

    known: dict[tuple[int | None, int], AttentionPlan] = field(default_factory=dict)


@register("paged_attention", "triton")
def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contract of the reference; groups need no masks, and sequences of any sizes may be in one.

    Raises:
        KernelInputError: the arguments are not served.
    """
    check("paged_attention", scale > 0.0, f"a scale of {scale}")
    _check_inputs(query, cache, window, soft_cap, scales)
    tokens, heads, dim = query.shape
    kv_heads = cache.shape[3]
    target, padded = target_of(query.device), max(16, power_of_2(dim))
    tile = prefill_tile(target, padded, query.dtype.itemsize)
    plan = _plan(batch, tokens, cache, heads // kv_heads, tile.rows, window)
    out = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
    common: dict[str, Any] = {
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "block_stride": cache.stride(0),
        "token_stride": cache.stride(1),
        "value_offset": cache.stride(2),
        "head_stride": cache.stride(3),
        "out_stride": out.stride(0),
        "scale": (scale if soft_cap is None else soft_cap) * _LOG2_E,
        "cap_scale": 0.0 if soft_cap is None else 2.0 * _LOG2_E * scale / soft_cap,
        "window": 0 if window is None else window,
        "scales": query if scales is None else scales,
        "PER_KV_HEAD": heads // kv_heads,
        "DIM": dim,
        "DIM_PADDED": padded,
        "BLOCK_SIZE": cache.shape[1],
        "DOT": dot_dtype(query.dtype),
        "WINDOW": window is not None,
        "SOFT_CAP": soft_cap is not None,
        "SCALED": scales is not None,
    }
    if plan.prefill is not None:
        prefill_kernel[(kv_heads, plan.prefill.tiles)](
            query, cache, plan.blocks, plan.prefill.rows, out, tiles=plan.prefill.tiles, **common, **tile.launch
        )
    if plan.decode is not None:
        _decode(query, cache, plan, out, common)
    return out


def _decode(
    query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, out: torch.Tensor, common: dict[str, Any]
) -> None:
    decode = plan.decode
    assert decode is not None
    heads, kv_heads, dim = query.shape[1], cache.shape[3], query.shape[2]
    tile = decode_tile(
        target_of(query.device), common["DIM_PADDED"], query.dtype.itemsize, heads // kv_heads, common["SCALED"]
    )
    mixed = stats = out
    if decode.splits > 1:
        mixed = torch.empty((decode.sequences, heads, decode.splits, dim), dtype=torch.float32, device=query.device)
        stats = torch.empty((decode.sequences, heads, decode.splits, 2), dtype=torch.float32, device=query.device)
    decode_kernel[(kv_heads, decode.sequences, decode.splits)](
        query,
        cache,
        plan.blocks,
        decode.rows,
        out,
        mixed,
        stats,
        sequences=decode.sequences,
        splits=decode.splits,
        SPLIT=decode.splits > 1,
        **common,
        **tile.launch,
    )
    if decode.splits > 1:
        merge_kernel[(decode.sequences, heads)](
            mixed,
            stats,
            decode.rows,
            out,
            sequences=decode.sequences,
            splits=decode.splits,
            out_stride=out.stride(0),
            window=common["window"],
            DIM=dim,
            DIM_PADDED=common["DIM_PADDED"],
            WINDOW=common["WINDOW"],
            MOST_SPLITS=MOST_SPLITS,
            TOGETHER=8,
            num_warps=2,
        )


def _plan(
    batch: AttentionBatch, tokens: int, cache: torch.Tensor, per_kv_head: int, rows: int, window: int | None
) -> AttentionPlan:
    plans = batch.plan
    if not isinstance(plans, _Plans):
        plans = batch.plan = _Plans()
    plan = plans.known.get((window, rows))
    if plan is None and batch.fixed is not None:
        _check_fixed(batch.fixed, cache, tokens)
        plan = plans.known[window, rows] = plan_fixed(batch.fixed, window)
    if plan is None:
        _check_groups(batch, cache.shape[1], tokens)
        plan = plans.known[window, rows] = plan_attention(batch, per_kv_head, rows, cache.shape[0], window)
    return plan


def unserved(head_dim: int, block_size: int, per_kv_head: int) -> str | None:
    """Why these kernels cannot attend for such a model, or None."""
    if not (8 <= head_dim <= 256 and head_dim % 8 == 0):
        return f"heads of {head_dim}; served are multiples of 8 up to 256"
    if block_size not in BLOCK_SIZES:
        return f"blocks of {block_size} tokens; served are {' and '.join(map(str, BLOCK_SIZES))}"
    if per_kv_head > MOST_HEADS_PER_KV_HEAD:
        return f"{per_kv_head} query heads for a KV head; served are up to {MOST_HEADS_PER_KV_HEAD}"
    return None


def _check_inputs(
    query: torch.Tensor,
    cache: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
    scales: torch.Tensor | None,
) -> None:
    name = "paged_attention"
    check_tensor(name, "query", query, dtypes=FLOATS, shape=(None, None, None))
    _, heads, dim = query.shape
    shape = (None, None, 2, None, dim)
    check_tensor(name, "cache", cache, dtypes=(*FLOATS, *FLOAT8), shape=shape, device=query.device)
    kv_heads, eight_bits = cache.shape[3], cache.dtype in FLOAT8
    check(name, kv_heads > 0 and heads % kv_heads == 0, f"{heads} query heads for {kv_heads} KV heads")
    reason = unserved(dim, cache.shape[1], heads // kv_heads)
    check(name, reason is None, reason or "")
    check(name, eight_bits or cache.dtype == query.dtype, f"query is {query.dtype}, the cache {cache.dtype}")
    check(name, eight_bits == (scales is not None), "scales belong to a cache of float8, and only to that")
    if scales is not None:
        check_tensor(name, "scales", scales, dtypes=(torch.float32,), shape=(2,), device=query.device)
        target = target_of(query.device)
        check(name, has_float8(target), f"{target} has no float8_e4m3fn")
    check(name, window is None or window > 0, f"a window of {window} keys")
    check(name, soft_cap is None or soft_cap > 0, f"a soft cap of {soft_cap}")


def _check_fixed(fixed: FixedDecode, cache: torch.Tensor, tokens: int) -> None:
    name, device = "paged_attention", cache.device
    shape = (tokens, None)
    check_tensor(name, "tables", fixed.tables, dtypes=(torch.int64,), shape=shape, device=device, contiguous=True)
    check_tensor(
        name, "lengths", fixed.lengths, dtypes=(torch.int64, torch.int32), shape=(tokens,), device=device
    )  # fmt: skip
    room = fixed.tables.shape[1] * cache.shape[1]
    check(name, 0 < fixed.most <= room, f"at most {fixed.most} keys for block tables of {room}")


def _check_groups(batch: AttentionBatch, block_size: int, tokens: int) -> None:
    name = "paged_attention"
    check(name, bool(batch.groups), "a batch without groups")
    rows = 0
    for group in batch.groups:
        blocks_each, rest = divmod(len(group.blocks), group.batch)
        longest = int(group.lengths.max(initial=0))
        check(name, rest == 0 and longest <= blocks_each * block_size, "a block table is too short for its keys")
        check(name, len(group.counts) == len(group.lengths) == group.batch, "counts and lengths do not fit the group")
        rows += int(group.counts.sum())
    check(name, rows == tokens, f"groups of {rows} rows for {tokens} of the query")
