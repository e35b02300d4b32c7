"""Draws that look only at the blocks which hold what the filters keep; same contract as the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.blocked import BLOCK, BlockedLogits
from kernels.cpu.logprobs import argmax
from kernels.cpu.tempered import OFF, Doubles, Floats, Ints, Tempered
from kernels.ops import register
from kernels.reference.sampling import draw_rows_with, search, uniforms_on

#: Blocks whose tokens top-p looks at first.
_PROBED = 64


@dataclass(frozen=True, slots=True)
class _Filters:
    """[n] each: rows, min-p's thresholds (-inf: off), k of top-k (0: off), p of top-p (1: off)."""

    tempered: Tempered
    least: Floats
    k: Ints
    p: Doubles

    def pick(self, places: Ints) -> _Filters:
        if len(places) == len(self.k):
            return self
        return _Filters(self.tempered.pick(places), self.least[places], self.k[places], self.p[places])


@register("draw", "cpu")
def draw(
    x: BlockedLogits,
    temperature: torch.Tensor,
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of the reference."""
    tempered = Tempered.of(x, temperature)
    k = np.array([k if 0 < k < x.vocab else 0 for k in top_k])
    filters = _Filters(tempered, tempered.best + _logs(min_p), k, np.array(top_p))
    filtered = (filters.least > OFF) | (filters.k > 0) | (filters.p < 1.0)
    token, threshold = np.empty(len(k), dtype=np.int64), filters.least.copy()
    rows = np.flatnonzero(filtered)
    if len(rows):
        token[rows], threshold[rows] = _draw_filtered(filters.pick(rows), _pick(uniform, rows))
    rows = np.flatnonzero(~filtered)
    if len(rows):
        token[rows] = _draw_any(tempered.pick(rows), _pick(uniform, rows))
    return torch.from_numpy(token), torch.from_numpy(threshold)


register("draw_rows", "cpu")(draw_rows_with(uniforms_on, draw))


def _draw_any(tempered: Tempered, uniform: torch.Tensor) -> Ints:
    """Among all tokens, in two steps: a running sum over a whole vocabulary would cost as much as all the rest."""
    weight = tempered.weights()
    block, before = search(weight.sum(-1).double(), uniform, None)
    inside = weight[torch.arange(len(block)), block].double()
    return (block * BLOCK + search(inside, uniform, before)[0]).numpy()


def _draw_filtered(filters: _Filters, uniform: torch.Tensor) -> tuple[Ints, Floats]:
    """Tokens and thresholds of rows with at least one filter.

    Top-p alone looks at the tokens of the best blocks first. Where they have too little mass, it looks at those of half
    of the blocks, then at all tokens that may be kept; and at all that there are, where so little may be left out that
    rounding decides.
    """
    limit, total = _least_of_top_k(filters), np.full(len(filters.k), np.nan)
    unlimited = np.flatnonzero((filters.k <= 0) & (filters.least == OFF))
    if len(unlimited):
        total[unlimited] = filters.tempered.pick(unlimited).masses().numpy()
    token, threshold = _draw_kept(filters, limit, total, uniform)
    for limits in (_least_of_half, _least_of_top_p, _no_limit):
        missed = np.flatnonzero(np.isnan(threshold))
        if not len(missed):
            break
        rest, point = filters.pick(missed), _pick(uniform, missed)
        token[missed], threshold[missed] = _draw_kept(rest, *limits(rest, total[missed]), point)
    return token, threshold


def _least_of_top_k(filters: _Filters) -> Floats:
    """Min-p's threshold, or what top-k certainly does not keep if that is more: the k best blocks have a logit each
    that is no less than the k-th best of their maxima."""
    peaks, k = np.sort(filters.tempered.peaks(), axis=1), filters.k
    blocks = peaks.shape[1]
    k = np.where((k <= 0) & (filters.least == OFF), min(_PROBED, blocks), k)
    kth = peaks[np.arange(len(k)), -np.clip(k, 1, blocks)]
    return np.where((k > 0) & (k <= blocks), np.maximum(filters.least, kth), filters.least)


def _least_of_half(filters: _Filters, total: Doubles) -> tuple[Floats, Doubles]:
    """What the better half of the blocks have at least a token of. The mass of all is what it was."""
    peaks = np.sort(filters.tempered.peaks(), axis=1)
    return np.maximum(filters.least, peaks[:, peaks.shape[1] // 2]), total


def _least_of_top_p(filters: _Filters, total: Doubles) -> tuple[Floats, Doubles]:
    """All tokens that have less than half of what may be left out, divided by the size of the vocabulary, have together
    less than that half: top-p keeps none of them. The mass of all is what it was."""
    least = (1.0 - filters.p) / 2.0 * total / filters.tempered.x.vocab
    return filters.tempered.shift() + _logs(least.tolist()), total


def _no_limit(filters: _Filters, total: Doubles) -> tuple[Floats, Doubles]:
    """With the mass of all to be summed up again, in descending order."""
    return filters.least, np.full_like(total, np.nan)


def _draw_kept(filters: _Filters, limit: Floats, total: Doubles, uniform: torch.Tensor) -> tuple[Ints, Floats]:
    """Tokens and thresholds of rows of which nothing below the limit can be kept.

    `total` is the mass that top-p takes its share of; NaN: of what the other filters keep. A threshold is NaN where
    less mass is at or above the limit than top-p asks for.
    """
    tempered = filters.tempered
    kept = tempered.kept(limit)
    token, threshold = np.empty(len(limit), dtype=np.int64), np.empty(len(limit), dtype=np.float32)
    for rows, values in kept.padded():
        part = filters.pick(rows)
        least = threshold[rows] = _thresholds(part, np.sort(values, axis=1)[:, ::-1], total[rows])
        weight = part.tempered.weights_of(np.where(values < least[:, None], OFF, values))
        place, _ = search(weight, _pick(uniform, rows), None)
        token[rows] = kept.ids(rows, place.numpy())
    alone = np.flatnonzero(threshold >= tempered.best)
    if len(alone):
        token[alone] = argmax(tempered.x).numpy()[tempered.rows[alone]]
    return token, threshold


def _thresholds(filters: _Filters, ordered: Floats, total: Doubles) -> Floats:
    """[n] for [n, m] logits, descending: all that may be kept, then what may not."""
    k, least, each = filters.k, filters.least, np.arange(len(ordered))
    # Where there are fewer than k, min-p keeps fewer, or there are no more.
    with_k = (k > 0) & (k <= ordered.shape[1])
    threshold = np.where(with_k, np.maximum(least, ordered[each, np.where(with_k, k - 1, 0)]), least)
    if (filters.p == 1.0).all():
        return threshold
    ordered = np.where(ordered < threshold[:, None], OFF, ordered)
    mass = filters.tempered.weights_of(ordered).cumsum(-1).numpy()
    reached = mass >= (filters.p * np.where(np.isnan(total), mass[:, -1], total))[:, None]
    cut = np.where(reached.any(axis=1), ordered[each, reached.argmax(axis=1)], np.float32(np.nan))
    return np.where(filters.p < 1.0, cut, threshold)


def _pick(uniform: torch.Tensor, places: Ints) -> torch.Tensor:
    """Of some rows, ascending, each once."""
    return uniform if len(places) == len(uniform) else uniform[torch.from_numpy(places)]


def _logs(numbers: Sequence[float]) -> Floats:
    # Python's logarithm: an array's may depend on the array's length in the last bit.
    return np.array([math.log(number) if number > 0.0 else OFF for number in numbers], dtype=np.float32)
