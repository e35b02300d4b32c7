"""Draws with min-p, top-k and top-p, without sorting: one program a row in each of two launches.

The first finds the blocks of logits that can hold what the filters keep, by the blocks' maxima. The second searches
the filters' threshold in those, two bits of it a pass, and draws. Sums run over a row's own blocks in the order of the
ids, in float64, so that a row's token does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.blocked import BLOCK, BlockedLogits
from kernels.ops import register
from kernels.reference.sampling import draw_rows_with, pack_filters
from kernels.transfer import to_device
from kernels.triton.launch import check, check_tensor, power_of_2
from kernels.triton.philox import uniforms

#: Logits that a program looks at together.
_TOGETHER = 2048


@triton.jit
def _ordered(value):
    """float32 as uint32 in the same order; -0 as +0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _value_of(ordered):
    """The float32 behind `_ordered`; -inf for what is below that."""
    bits = (tl.maximum(ordered, 0x007FFFFF) ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def candidates_kernel(
    values,
    peaks,
    best,
    temperature,
    filters,
    lists,
    counts,
    totals,
    rows,
    vocab,
    blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Blocks of one row that may hold what is kept, ascending; and the row's mass where top-p is its only filter.

    `filters` is [3, rows] float64: log of min-p (-inf: off), k of top-k (0: off), p of top-p (1: off).
    """
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    top = tl.div_rn(tl.load(best + row), heat)
    limit = top + tl.load(filters + row).to(tl.float32)
    k = tl.load(filters + rows + row).to(tl.int32)
    p = tl.load(filters + 2 * rows + row)
    each = tl.arange(0, BLOCKS)
    start = row.to(tl.int64) * blocks
    peak = tl.load(peaks + start + each, mask=each < blocks, other=float("-inf"))
    peak = tl.where(each < blocks, tl.div_rn(peak, heat), float("-inf"))
    total = tl.zeros((TOGETHER,), tl.float64)
    if (k > 0) & (k <= blocks):
        # Of the k blocks with the largest maxima each has a logit that is no less than the k-th of these.
        order = _ordered(peak)
        found = tl.zeros((1,), tl.uint32)
        for step in tl.static_range(32):
            bit = found | (tl.full((1,), 1, tl.uint32) << (31 - step))
            enough = tl.sum((order >= bit).to(tl.int32), 0) >= k
            found = tl.where(enough, bit, found)
        limit = tl.maximum(limit, tl.max(_value_of(found), 0))
    elif (k <= 0) & (limit == float("-inf")) & (p < 1.0):
        for first in range(0, blocks * BLOCK, TOGETHER):
            place = first + tl.arange(0, TOGETHER)
            raw = tl.load(values + start * BLOCK + place, mask=place < blocks * BLOCK, other=float("-inf"))
            total += tl.exp(tl.div_rn(raw, heat) - top).to(tl.float64)
        # All that have less than half of what may be left out, divided by the vocabulary's size, are left out; a
        # little lower, since the logarithm is rounded.
        least = (1.0 - p) * 0.5 * tl.sum(total, 0) / vocab
        limit = top + tl.log(tl.maximum(least, 1e-30).to(tl.float32)) - 0.001
    tl.store(totals + row, tl.sum(total, 0))
    chosen = (peak >= limit) & (peak > float("-inf"))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(lists + start + place, each, mask=chosen)
    tl.store(counts + row, tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def _quotients(values, lists, count, first, heat, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Some of a row's candidates: raw, divided by the temperature, and their ids; -inf behind the last."""
    place = first + tl.arange(0, TOGETHER)
    inside = place < count * BLOCK
    token = tl.load(lists + place // BLOCK, mask=inside, other=0) * BLOCK + place % BLOCK
    raw = tl.load(values + token, mask=inside, other=float("-inf"))
    return raw, tl.where(inside, tl.div_rn(raw, heat), float("-inf")), token


@triton.jit
def _weights(x, threshold, top):
    """float64: zero below the threshold, whose -inf keeps all."""
    return tl.where(x >= threshold, tl.exp(x - top), 0.0).to(tl.float64)


@triton.jit
def _kth(values, lists, count, heat, k, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th largest quotient: the largest number that k of them are no less than."""
    found = tl.zeros((1,), tl.uint32)
    for step in tl.static_range(16):
        one = tl.full((1,), 1, tl.uint32) << (30 - 2 * step)
        # Three counts in one sum, of 21 bits each.
        packed = tl.zeros((TOGETHER,), tl.int64)
        for first in range(0, count * BLOCK, TOGETHER):
            _raw, x, _token = _quotients(values, lists, count, first, heat, TOGETHER, BLOCK)
            order = _ordered(x)
            packed += (order >= (found | one)).to(tl.int64)
            packed += (order >= (found | (one << 1))).to(tl.int64) << 21
            packed += (order >= (found | one | (one << 1))).to(tl.int64) << 42
        sums = tl.sum(packed, 0)
        enough_1, enough_2, enough_3 = sums & 0x1FFFFF, (sums >> 21) & 0x1FFFFF, sums >> 42
        bits = (enough_1 >= k).to(tl.uint32) + (enough_2 >= k).to(tl.uint32) + (enough_3 >= k).to(tl.uint32)
        found = found | (one * bits)
    return tl.max(_value_of(found), 0)


@triton.jit
def _nucleus(values, lists, count, heat, top, threshold, target, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number that quotients with the mass of the target are no less than, of those above the threshold."""
    found = tl.zeros((1,), tl.uint32)
    for step in tl.static_range(16):
        one = tl.full((1,), 1, tl.uint32) << (30 - 2 * step)
        mass_1 = tl.zeros((TOGETHER,), tl.float64)
        mass_2 = tl.zeros((TOGETHER,), tl.float64)
        mass_3 = tl.zeros((TOGETHER,), tl.float64)
        for first in range(0, count * BLOCK, TOGETHER):
            _raw, x, _token = _quotients(values, lists, count, first, heat, TOGETHER, BLOCK)
            order, weight = _ordered(x), _weights(x, threshold, top)
            mass_1 += tl.where(order >= (found | one), weight, 0.0)
            mass_2 += tl.where(order >= (found | (one << 1)), weight, 0.0)
            mass_3 += tl.where(order >= (found | one | (one << 1)), weight, 0.0)
        bits = (tl.sum(mass_1, 0) >= target).to(tl.uint32)
        bits += (tl.sum(mass_2, 0) >= target).to(tl.uint32)
        bits += (tl.sum(mass_3, 0) >= target).to(tl.uint32)
        found = found | (one * bits)
    return tl.max(_value_of(found), 0)


@triton.jit(do_not_specialize=["rows"])
def draw_kernel(
    values,
    best,
    temperature,
    filters,
    uniform,
    lists,
    counts,
    totals,
    tokens,
    thresholds,
    rows,
    vocab,
    blocks,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Threshold and token of one row, from its candidates."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * blocks
    values += start * BLOCK
    lists += start
    count = tl.load(counts + row)
    heat = tl.load(temperature + row)
    peak = tl.load(best + row)
    top = tl.div_rn(peak, heat)
    threshold = top + tl.load(filters + row).to(tl.float32)
    k = tl.load(filters + rows + row).to(tl.int32)
    p = tl.load(filters + 2 * rows + row)
    total = tl.load(totals + row)
    if k > 0:
        threshold = tl.maximum(threshold, _kth(values, lists, count, heat, k, TOGETHER, BLOCK))
    if p < 1.0:
        if total == 0.0:
            kept = tl.zeros((TOGETHER,), tl.float64)
            for first in range(0, count * BLOCK, TOGETHER):
                _raw, x, _token = _quotients(values, lists, count, first, heat, TOGETHER, BLOCK)
                kept += _weights(x, threshold, top)
            total = tl.sum(kept, 0)
        cut = _nucleus(values, lists, count, heat, top, threshold, p * total, TOGETHER, BLOCK)
        threshold = tl.maximum(threshold, cut)
    tl.store(thresholds + row, threshold)

    # The mass of what is kept; and the first of the best, which is taken where nothing else is kept.
    mass = tl.zeros((1,), tl.float64)
    first_best = tl.full((1,), 0x7FFFFFFF, tl.int32)
    for first in range(0, count * BLOCK, TOGETHER):
        raw, x, token = _quotients(values, lists, count, first, heat, TOGETHER, BLOCK)
        mass += tl.sum(_weights(x, threshold, top), 0)
        first_best = tl.minimum(first_best, tl.min(tl.where(raw == peak, token, 0x7FFFFFFF), 0))
    below = (mass.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    point = tl.maximum(tl.minimum(tl.load(uniform + row) * mass, below), 0.0)

    # Where the running sum passes the point: first among pieces, then within one.
    passed = tl.zeros((1,), tl.float64)
    piece = tl.zeros((1,), tl.int32)
    before = tl.zeros((1,), tl.float64)
    reached = tl.zeros((1,), tl.int32)
    for first in range(0, count * BLOCK, TOGETHER):
        raw, x, token = _quotients(values, lists, count, first, heat, TOGETHER, BLOCK)
        behind = passed + tl.sum(_weights(x, threshold, top), 0)
        here = (reached == 0) & (behind > point)
        piece = tl.where(here, first, piece)
        before = tl.where(here, passed, before)
        reached = tl.where(here, 1, reached)
        passed = behind
    _raw, x, token = _quotients(values, lists, count, tl.max(piece, 0), heat, TOGETHER, BLOCK)
    weight = _weights(x, threshold, top)
    hit = (tl.cumsum(weight, 0) + before > point) & (weight > 0.0)
    drawn = tl.min(tl.where(hit, token, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(weight > 0.0, token, 0), 0)  # if rounding left the sum below the point
    drawn = tl.where(drawn == 0x7FFFFFFF, last, drawn)
    drawn = tl.where(threshold >= top, tl.max(first_best, 0), drawn)
    tl.store(tokens + row, drawn.to(tl.int64))


@register("draw", "triton")
def draw(
    x: BlockedLogits,
    temperature: torch.Tensor,
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of the reference.

    Raises:
        KernelInputError: the arguments are not served.
    """
    rows = len(x.values)
    check("draw", len(top_k) == len(top_p) == len(min_p) == rows, f"filters of other than {rows} rows")
    filters = to_device(pack_filters(top_k, top_p, min_p, x.vocab), x.values.device)
    return draw_packed(x, temperature, filters, uniform)


register("draw_rows", "triton")(draw_rows_with(uniforms, draw))


@register("draw_packed", "triton")
def draw_packed(
    x: BlockedLogits, temperature: torch.Tensor, filters: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of the reference.

    Raises:
        KernelInputError: the arguments are not served.
    """
    name, (rows, width), device = "draw", x.values.shape, x.values.device
    check_tensor(name, "values", x.values, dtypes=(torch.float32,), shape=(None, None), contiguous=True)
    check(name, width % BLOCK == 0 and width < 1 << 21, f"{width} logits; served are multiples of {BLOCK} below 2^21")
    blocks = width // BLOCK
    for label, tensor, shape, dtype in (
        ("peaks", x.peaks, (rows, blocks), torch.float32),
        ("best", x.best, (rows,), torch.float32),
        ("temperature", temperature, (rows,), torch.float32),
        ("filters", filters, (3, rows), torch.float64),
        ("uniform", uniform, (rows,), torch.float64),
    ):
        check_tensor(name, label, tensor, dtypes=(dtype,), shape=shape, device=device, contiguous=True)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens, thresholds
    lists = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    totals = torch.empty(rows, dtype=torch.float64, device=device)
    candidates_kernel[(rows,)](
        x.values,
        x.peaks,
        x.best,
        temperature,
        filters,
        lists,
        counts,
        totals,
        rows,
        x.vocab,
        blocks,
        BLOCKS=power_of_2(blocks),
        BLOCK=BLOCK,
        TOGETHER=_TOGETHER,
        num_warps=8,
    )
    draw_kernel[(rows,)](
        x.values,
        x.best,
        temperature,
        filters,
        uniform,
        lists,
        counts,
        totals,
        tokens,
        thresholds,
        rows,
        x.vocab,
        blocks,
        BLOCK=BLOCK,
        TOGETHER=_TOGETHER,
        num_warps=8,
    )
    return tokens, thresholds
