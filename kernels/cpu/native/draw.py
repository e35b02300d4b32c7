"""Native draws, and what log probabilities are made of: see `src/draw.h`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from ctypes import addressof, c_float, c_int64
from typing import Any

import torch

from kernels.blocked import BlockedLogits
from kernels.cpu.native import library as native
from kernels.cpu.native.program import issue
from kernels.ops import register
from kernels.reference.sampling import DrawnRows

_SEED = 0xFFFFFFFFFFFFFFFF


def logits_of(x: BlockedLogits) -> native.Logits:
    """As the library takes them."""
    return native.Logits(x.values.data_ptr(), x.peaks.data_ptr(), x.peaks.shape[1], x.vocab)


@register("draw", "cpu.native")
def draw(
    x: BlockedLogits,
    temperature: torch.Tensor,
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of the reference. A row's result depends, bit for bit, on its own logits and options alone."""
    rows = len(top_k)
    tokens, thresholds = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    numbers = array("q", top_k), array("d", top_p), array("d", min_p)
    heat, points = temperature.contiguous(), uniform.contiguous()
    record = native.Draw(
        logits_of(x),
        None,
        heat.data_ptr(),
        *(each.buffer_info()[0] for each in numbers),
        points.data_ptr(),
        tokens=tokens.data_ptr(),
        thresholds=thresholds.data_ptr(),
    )
    issue(record, rows, x.values, x.peaks, heat, points, tokens, thresholds)
    return tokens, thresholds


@register("draw_rows", "cpu.native")
def draw_rows(x: BlockedLogits, drawn: DrawnRows) -> list[int]:
    """Contract of the reference. Nothing is asked of torch but where the logits are: see `docs/kernels.md`."""
    rows = len(drawn.rows)
    tokens, thresholds = (c_int64 * rows)(), (c_float * rows)()
    heat = array("f", drawn.temperature)
    whole = array("q", drawn.rows + drawn.top_k + drawn.choices + drawn.positions)
    shares = array("d", drawn.top_p + drawn.min_p)
    seeds = array("Q", [seed & _SEED for seed in drawn.seeds])
    numbers, top_k, choices, positions = _parts(whole, rows)
    top_p, min_p = _parts(shares, rows)
    record = native.Draw(
        logits_of(x),
        numbers,
        heat.buffer_info()[0],
        top_k,
        top_p,
        min_p,
        None,
        seeds.buffer_info()[0],
        choices,
        positions,
        addressof(tokens),
        addressof(thresholds),
    )
    issue(record, rows)
    return tokens[:]


def _parts(numbers: array[Any], size: int) -> Iterator[int]:
    """Where each of several runs of so many numbers begins."""
    address, count = numbers.buffer_info()
    step = size * numbers.itemsize
    return (address + part * step for part in range(count // size))


@register("argmax", "cpu.native")
def argmax(x: BlockedLogits) -> torch.Tensor:
    """Contract of the reference."""
    tokens = torch.empty(len(x.values), dtype=torch.int64)
    issue(native.Scores(logits_of(x), tokens=tokens.data_ptr()), len(tokens), x.values, x.peaks, tokens)
    return tokens


@register("log_sum_exp", "cpu.native")
def log_sum_exp(x: BlockedLogits) -> torch.Tensor:
    """Contract of the reference."""
    norms = torch.empty(len(x.values), dtype=torch.float64)
    issue(native.Scores(logits_of(x), norms=norms.data_ptr()), len(norms), x.values, x.peaks, norms)
    return norms


@register("largest", "cpu.native")
def largest(x: BlockedLogits, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of the reference."""
    rows = len(x.values)
    values, ids = torch.empty(rows, count), torch.empty((rows, count), dtype=torch.int64)
    record = native.Scores(logits_of(x), largest=values.data_ptr(), ids=ids.data_ptr(), count=count)
    issue(record, rows, x.values, x.peaks, values, ids)
    return values, ids


@register("count_above", "cpu.native")
def count_above(x: BlockedLogits, limit: torch.Tensor) -> torch.Tensor:
    """Contract of the reference."""
    limit = limit.contiguous()
    above = torch.empty(len(limit), dtype=torch.int64)
    record = native.Scores(logits_of(x), limits=limit.data_ptr(), above=above.data_ptr())
    issue(record, len(limit), x.values, x.peaks, limit, above)
    return above


@register("take_rows", "cpu.native")
def take_rows(x: BlockedLogits, rows: list[int], out: BlockedLogits) -> None:
    """Contract of the reference."""
    numbers, (entries, width), dtype = array("q", rows), x.values.shape, native.DTYPES[torch.float32]
    source, target = x.values.data_ptr(), out.values.data_ptr()
    ids = numbers.buffer_info()[0]
    issue(native.Gather(source, ids, target, entries, width, dtype, dtype, native.ROWS), len(rows))


@register("find_maxima", "cpu.native")
def find_maxima(x: BlockedLogits) -> None:
    """Contract of the reference."""
    fill_maxima(x.values, x.peaks, x.best)


def fill_maxima(values: torch.Tensor | None, peaks: torch.Tensor, best: torch.Tensor) -> None:
    """Fill in the maxima of [rows, width] values' blocks, unless they are there, and of the rows."""
    record = native.Maxima(
        None if values is None else values.data_ptr(), peaks.data_ptr(), best.data_ptr(), peaks.shape[1]
    )
    issue(record, len(best), peaks, best, *(() if values is None else (values,)))
