"""The kernels of paged attention: decodes split over their keys, prefill chunks in tiles of query rows.

The query heads of one KV head are rows of one tile, so that each key and value is read once for all of them. The
softmax runs along with the keys (Milakov and Gimelshein, 2018; Dao et al., 2022); a decode's keys are cut into parts
whose results are merged in order (as in Flash-Decoding, 2023). Scores are in units of log 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.rounding import rounded


@triton.jit
def _walk(
    query,
    mixed,
    top,
    total,
    first,
    end,
    low,
    high,
    blocks,
    cache,
    block_stride,
    token_stride,
    value_offset,
    scale,
    cap_scale,
    MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Go on with a tile's rows over the keys [first, end): row i sees those in [low[i], high[i]).

    `scale` takes scores, or with SOFT_CAP their hyperbolic tangents, to units of log 2; `cap_scale` takes scores to
    twice the tangent's argument in units of log 2.
    """
    dim = tl.arange(0, DIM_PADDED)
    for start in range(first, end, KEYS):
        position = start + tl.arange(0, KEYS)
        if MASKED:
            block = tl.load(blocks + position // BLOCK_SIZE, mask=position < end, other=0)
        else:
            block = tl.load(blocks + position // BLOCK_SIZE)
        place = block * block_stride + (position % BLOCK_SIZE) * token_stride
        keys = cache + place[None, :] + dim[:, None]
        values = cache + value_offset + place[:, None] + dim[None, :]
        if MASKED:
            key = tl.load(keys, mask=(position < end)[None, :] & (dim < DIM)[:, None], other=0.0)
        elif DIM == DIM_PADDED:
            key = tl.load(keys)
        else:
            key = tl.load(keys, mask=(dim < DIM)[:, None], other=0.0)
        score = tl.dot(query, key.to(DOT), input_precision="ieee")
        if SOFT_CAP:
            # tanh(score / cap); its scale is that of the units.
            score = 1.0 - 2.0 / (tl.exp2(tl.minimum(score * cap_scale, 126.0)) + 1.0)
        if MASKED:
            seen = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
            score = tl.where(seen, score, float("-inf"))
        # The scale is positive: it is multiplied after the maximum, and within the subtraction.
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        # A row that has seen nothing yet stays at -inf, which must not be subtracted from itself.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        if MASKED:
            value = tl.load(values, mask=(position < end)[:, None] & (dim < DIM)[None, :], other=0.0)
        elif DIM == DIM_PADDED:
            value = tl.load(values)
        else:
            value = tl.load(values, mask=(dim < DIM)[None, :], other=0.0)
        mixed = tl.dot(weight.to(DOT), value.to(DOT), mixed * fade[:, None], input_precision="ieee")
        top = new_top
    return mixed, top, total


@triton.jit(do_not_specialize=["sequences", "splits", "window"])
def decode_kernel(
    query,
    cache,
    blocks,
    plan,
    out,
    part_mixed,
    part_stats,
    scales,
    sequences,
    splits,
    query_stride,
    query_head_stride,
    block_stride,
    token_stride,
    value_offset,
    head_stride,
    out_stride,
    scale,
    cap_scale,
    window,
    PER_KV_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program attends for one sequence's query heads of one KV head to one cut of its keys.

    Without SPLIT no sequence has several cuts and the result is written at once; else parts for `merge_kernel`.
    """
    # KV heads are neighbours in memory, and so they are in the order of programs.
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(plan + sequence).to(tl.int64)
    table = tl.load(plan + sequences + sequence)
    length = tl.load(plan + 2 * sequences + sequence)
    cut = tl.load(plan + 3 * sequences + sequence)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0)
    first = begin + split * cut
    end = tl.minimum(first + cut, length)
    if SPLIT and first >= length:
        return
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    inside = (row < PER_KV_HEAD)[:, None] & (dim < DIM)[None, :]
    head = kv_head * PER_KV_HEAD + row
    places = query + token * query_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(places, mask=inside, other=0.0).to(DOT)
    if SCALED:
        if SOFT_CAP:
            cap_scale *= tl.load(scales)
        else:
            scale *= tl.load(scales)
    mixed = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    low = tl.zeros((ROWS,), tl.int32)
    high = tl.zeros((ROWS,), tl.int32) + length
    my_cache = cache + kv_head.to(tl.int64) * head_stride
    whole = first + tl.maximum(end - first, 0) // KEYS * KEYS
    mixed, top, total = _walk(
        q, mixed, top, total, first, whole, low, high, blocks + table, my_cache, block_stride, token_stride,
        value_offset, scale, cap_scale, False, SOFT_CAP, DIM, DIM_PADDED, BLOCK_SIZE, KEYS, DOT,
    )  # fmt: skip
    mixed, top, total = _walk(
        q, mixed, top, total, whole, end, low, high, blocks + table, my_cache, block_stride, token_stride,
        value_offset, scale, cap_scale, True, SOFT_CAP, DIM, DIM_PADDED, BLOCK_SIZE, KEYS, DOT,
    )  # fmt: skip
    if SCALED:
        mixed *= tl.load(scales + 1)
    if SPLIT:
        part = (sequence.to(tl.int64) * tl.num_programs(0) * PER_KV_HEAD + head) * splits + split
        tl.store(part_mixed + part[:, None] * DIM + dim[None, :], mixed, mask=inside)
        tl.store(part_stats + part * 2, top, mask=row < PER_KV_HEAD)
        tl.store(part_stats + part * 2 + 1, total, mask=row < PER_KV_HEAD)
    else:
        # A padded sequence without a key gets zeros.
        result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        places = out + token * out_stride + head[:, None] * DIM + dim[None, :]
        tl.store(places, rounded(result, out), mask=inside)


@triton.jit(do_not_specialize=["sequences", "splits", "window"])
def merge_kernel(
    part_mixed,
    part_stats,
    plan,
    out,
    sequences,
    splits,
    out_stride,
    window,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One program puts the parts of one head together, in their order."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(plan + sequence).to(tl.int64)
    span = tl.load(plan + 2 * sequences + sequence)
    cut = tl.load(plan + 3 * sequences + sequence)
    if WINDOW:
        span = tl.minimum(span, window)
    count = (span + cut - 1) // cut
    first = (sequence.to(tl.int64) * tl.num_programs(1) + head) * splits
    each = tl.arange(0, MOST_SPLITS)
    tops = tl.load(part_stats + (first + each) * 2, mask=each < count, other=float("-inf"))
    totals = tl.load(part_stats + (first + each) * 2 + 1, mask=each < count, other=0.0)
    best = tl.max(tops, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(totals * tl.exp2(tops - best), 0)
    dim = tl.arange(0, DIM_PADDED)
    mixed = tl.zeros((DIM_PADDED,), tl.float32)
    for start in range(0, count, TOGETHER):
        some = start + tl.arange(0, TOGETHER)
        weight = tl.exp2(tl.load(part_stats + (first + some) * 2, mask=some < count, other=float("-inf")) - best)
        inside = (some < count)[:, None] & (dim < DIM)[None, :]
        part = tl.load(part_mixed + (first + some)[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        mixed += tl.sum(part * weight[:, None], 0)
    mixed = mixed / tl.where(total > 0.0, total, 1.0)
    tl.store(out + token * out_stride + head * DIM + dim, rounded(mixed, out), mask=dim < DIM)


@triton.jit(do_not_specialize=["tiles", "window"])
def prefill_kernel(
    query,
    cache,
    blocks,
    plan,
    out,
    scales,
    tiles,
    query_stride,
    query_head_stride,
    block_stride,
    token_stride,
    value_offset,
    head_stride,
    out_stride,
    scale,
    cap_scale,
    window,
    PER_KV_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One program attends for one tile of query rows of one sequence and one KV head."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(plan + tile).to(tl.int64)
    table = tl.load(plan + tiles + tile)
    length = tl.load(plan + 2 * tiles + tile)
    count = tl.load(plan + 3 * tiles + tile)
    first_row = tl.load(plan + 4 * tiles + tile)
    row = first_row + tl.arange(0, ROWS)
    own = row // PER_KV_HEAD
    valid = own < count
    high = tl.where(valid, length - count + own + 1, 0)
    head = kv_head * PER_KV_HEAD + row % PER_KV_HEAD
    dim = tl.arange(0, DIM_PADDED)
    inside = valid[:, None] & (dim < DIM)[None, :]
    token = first_token + own
    places = query + token[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(places, mask=inside, other=0.0).to(DOT)
    if SCALED:
        if SOFT_CAP:
            cap_scale *= tl.load(scales)
        else:
            scale *= tl.load(scales)
    mixed = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    my_cache = cache + kv_head.to(tl.int64) * head_stride
    least = length - count + first_row // PER_KV_HEAD + 1
    end = tl.max(high, 0)
    low = tl.zeros((ROWS,), tl.int32)
    first = 0
    if WINDOW:
        low = tl.maximum(high - window, 0)
        first = tl.maximum(least - window, 0)
        whole = first
    else:
        # What even the first row sees needs no mask.
        whole = least // KEYS * KEYS
        mixed, top, total = _walk(
            q, mixed, top, total, first, whole, low, high, blocks + table, my_cache, block_stride, token_stride,
            value_offset, scale, cap_scale, False, SOFT_CAP, DIM, DIM_PADDED, BLOCK_SIZE, KEYS, DOT,
        )  # fmt: skip
    mixed, top, total = _walk(
        q, mixed, top, total, whole, end, low, high, blocks + table, my_cache, block_stride, token_stride,
        value_offset, scale, cap_scale, True, SOFT_CAP, DIM, DIM_PADDED, BLOCK_SIZE, KEYS, DOT,
    )  # fmt: skip
    if SCALED:
        mixed *= tl.load(scales + 1)
    result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    places = out + token[:, None] * out_stride + head[:, None] * DIM + dim[None, :]
    tl.store(places, rounded(result, out), mask=inside)
