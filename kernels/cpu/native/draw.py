"""Native draws, and what log probabilities are made of: see `src/draw.h`."""

from __future__ import annotations

from array import array

import torch

from kernels.blocked import BlockedLogits
from kernels.cpu.native import library as native
from kernels.cpu.native.program import issue
from kernels.ops import register


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


def maxima(values: torch.Tensor | None, peaks: torch.Tensor, best: torch.Tensor) -> None:
    """Fill in the maxima of [rows, width] values' blocks, unless they are there, and of the rows."""
    record = native.Maxima(
        None if values is None else values.data_ptr(), peaks.data_ptr(), best.data_ptr(), peaks.shape[1]
    )
    issue(record, len(best), peaks, best, *(() if values is None else (values,)))
