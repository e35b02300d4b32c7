"""Filters and draws that look only at the blocks which hold what is kept; same contracts as the references.

What is done for a row depends on that row alone, and so does each result: a sum in float64 that goes from token to
token, or from block to block, does not change where zeros follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.blocked import BLOCK, BlockedLogits
from kernels.cpu.blocks import Doubles, Floats, Ints, pairs, take
from kernels.ops import register
from kernels.reference.sampling import search

_OFF = float("-inf")

#: Rows that keep more tokens are not padded together with rows that keep fewer.
_FEW = 1024


@dataclass(frozen=True, slots=True)
class _Kept:
    """Tokens of some rows, row by row and in order of their ids.

    Attributes:
        counts: [rows].
        values: [tokens] logits divided by temperature.
        blocks: [blocks looked at], their numbers.
        places: [tokens] in these blocks end to end.
    """

    counts: Ints
    values: Floats
    blocks: Ints
    places: Ints

    def padded(self) -> Iterator[tuple[Ints, Floats]]:
        """The values, [some rows, most], padded with -inf on the right; with those rows' numbers."""
        many = self.counts > _FEW
        for rows, mine in ((np.flatnonzero(each), each) for each in (~many, many) if each.any()):
            counts = self.counts[rows]
            values = np.full((len(rows), counts.max()), _OFF, dtype=np.float32)
            whole = len(rows) == len(mine)
            values[np.arange(counts.max()) < counts[:, None]] = (
                self.values if whole else self.values[np.repeat(mine, self.counts)]
            )
            yield rows, values

    def ids(self, rows: Ints, order: Ints) -> Ints:
        """Token ids of some rows' tokens, by their order within the row."""
        place = self.places[(np.cumsum(self.counts) - self.counts)[rows] + order]
        return self.blocks[place // BLOCK] * BLOCK + place % BLOCK


@dataclass(frozen=True, slots=True)
class _Tempered:
    """Some rows of logits, which are divided by their temperature where they are looked at.

    Division by a positive number keeps the order, so the maximum of the quotients is the quotient of the maximum.

    Attributes:
        x: the logits.
        rows: [n] which rows.
        scale: [n] their temperatures.
        best: [n] maxima of the quotients.
    """

    x: BlockedLogits
    rows: Ints
    scale: Floats
    best: Floats

    @classmethod
    def of(cls, x: BlockedLogits, temperature: torch.Tensor) -> _Tempered:
        scale = temperature.numpy()
        return cls(x, np.arange(len(scale)), scale, x.best.numpy() / scale)

    def pick(self, places: Ints) -> _Tempered:
        return _Tempered(self.x, self.rows[places], self.scale[places], self.best[places])

    def peaks(self) -> Floats:
        """[n, blocks]: maxima of the blocks' quotients."""
        # torch divides here and below: it does not warn where the least logits overflow to -inf.
        return (self.x.peaks[torch.from_numpy(self.rows)] / torch.from_numpy(self.scale).unsqueeze(1)).numpy()

    def kept(self, limit: Floats) -> _Kept:
        """What is at or above the [n] limit."""
        row, block = pairs(self.peaks() >= limit[:, None])
        values = take(self.x, self.rows[row], block).div_(torch.from_numpy(self.scale[row]).unsqueeze(1)).numpy()
        kept = values >= limit[row, None]
        counts = np.bincount(row, weights=np.count_nonzero(kept, axis=1), minlength=len(limit)).astype(np.int64)
        places = np.flatnonzero(kept)
        return _Kept(counts, values.reshape(-1)[places], block, places)

    def weights(self) -> torch.Tensor:
        """exp(quotient - maximum) of all tokens, [n, blocks, BLOCK]."""
        scale, best = (torch.from_numpy(numbers).view(-1, 1, 1) for numbers in (self.scale, self.best))
        return (self.x.select(self.rows.tolist()).blocks / scale).sub_(best).exp_()


@dataclass(frozen=True, slots=True)
class _Filters:
    """[n] each: rows, min-p's thresholds, k of top-k (0: off), p of top-p (1: off)."""

    tempered: _Tempered
    least: Floats
    k: Ints
    p: Doubles

    def pick(self, places: Ints) -> _Filters:
        return _Filters(self.tempered.pick(places), self.least[places], self.k[places], self.p[places])


@register("keep_threshold", "cpu")
def keep_threshold(
    x: BlockedLogits, temperature: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]
) -> torch.Tensor:
    """Contract of the reference."""
    tempered = _Tempered.of(x, temperature)
    threshold = tempered.best + _logs(min_p)
    k = np.array([k if 0 < k < x.vocab else 0 for k in top_k])
    filters = _Filters(tempered, threshold, k, np.array(top_p))
    rows = np.flatnonzero((k > 0) | (filters.p < 1.0))
    if len(rows):
        threshold[rows] = _filter(filters.pick(rows))
    return torch.from_numpy(threshold)


def _filter(filters: _Filters) -> Floats:
    """Thresholds after top-k and top-p."""
    limit, total = _least_of_top_k(filters), np.full(len(filters.k), np.nan)
    unlimited = np.flatnonzero((filters.k == 0) & (limit == _OFF))
    if len(unlimited):
        limit[unlimited], total[unlimited] = _least_of_top_p(filters.pick(unlimited))
    threshold = _cut(filters, limit, total)
    missed = np.flatnonzero(np.isnan(threshold))
    if len(missed):  # so little may be left out that rounding decides
        rest = filters.pick(missed)
        threshold[missed] = _cut(rest, rest.least, total[missed] * np.nan)
    return threshold


def _least_of_top_k(filters: _Filters) -> Floats:
    """Min-p's threshold, or what top-k certainly does not keep if that is more: the k best blocks have a logit each
    that is no less than the k-th best of their maxima."""
    peaks = np.sort(filters.tempered.peaks(), axis=1)
    k = filters.k
    kth = peaks[np.arange(len(k)), -np.clip(k, 1, peaks.shape[1])]
    return np.where((k > 0) & (k <= peaks.shape[1]), np.maximum(filters.least, kth), filters.least)


def _least_of_top_p(filters: _Filters) -> tuple[Floats, Doubles]:
    """What top-p alone certainly does not keep, and the mass of all tokens.

    All tokens that have less than half of what may be left out, divided by the size of the vocabulary, have together
    less than that half.
    """
    tempered = filters.tempered
    total = tempered.weights().sum(-1).double().cumsum(-1)[:, -1].numpy()
    return tempered.best + _logs(((1.0 - filters.p) / 2.0 * total / tempered.x.vocab).tolist()), total


def _cut(filters: _Filters, limit: Floats, total: Doubles) -> Floats:
    """Thresholds of rows of which only what is at or above the limit can be kept.

    `total` is the mass that top-p takes its share of; NaN: of what the other filters keep. The answer is NaN where the
    tokens at or above the limit have less.
    """
    result = filters.least.copy()
    for rows, values in filters.tempered.kept(limit).padded():
        ordered = np.sort(values, axis=1)[:, ::-1]
        part = filters.pick(rows)
        threshold = _top_k(part, ordered)
        if (part.p < 1.0).any():
            threshold = _top_p(part, np.where(ordered < threshold[:, None], _OFF, ordered), threshold, total[rows])
        result[rows] = threshold
    return result


def _top_k(filters: _Filters, ordered: Floats) -> Floats:
    """Min-p's threshold, raised to the k-th of each row; where there are fewer, min-p keeps fewer."""
    there = (filters.k > 0) & (filters.k <= ordered.shape[1])
    kth = ordered[np.arange(len(there)), np.where(there, filters.k - 1, 0)]
    return np.where(there, np.maximum(filters.least, kth), filters.least)


def _top_p(filters: _Filters, ordered: Floats, threshold: Floats, total: Doubles) -> Floats:
    """The threshold, raised to where the running sum over [n, m] descending logits reaches its share of the total."""
    mass = torch.from_numpy(ordered - filters.tempered.best[:, None]).exp_().double().cumsum(-1).numpy()
    reached = mass >= (filters.p * np.where(np.isnan(total), mass[:, -1], total))[:, None]
    cut = ordered[np.arange(len(ordered)), reached.argmax(axis=1)]
    cut = np.where(reached.any(axis=1), cut, np.float32(np.nan))
    return np.where(filters.p < 1.0, cut, threshold)


def _logs(numbers: Sequence[float]) -> Floats:
    # Python's logarithm: an array's may depend on the array's length in the last bit.
    return np.array([math.log(number) if number > 0.0 else _OFF for number in numbers], dtype=np.float32)


@register("draw", "cpu")
def draw(x: BlockedLogits, temperature: torch.Tensor, threshold: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Contract of the reference."""
    limit, tempered = threshold.numpy(), _Tempered.of(x, temperature)
    token = np.empty(len(limit), dtype=np.int64)
    for rows, pick in (np.flatnonzero(limit > _OFF), _draw_kept), (np.flatnonzero(limit == _OFF), _draw_any):
        if len(rows):
            token[rows] = pick(tempered.pick(rows), limit[rows], uniform[torch.from_numpy(rows)])
    return torch.from_numpy(token)


def _draw_kept(tempered: _Tempered, limit: Floats, uniform: torch.Tensor) -> Ints:
    """Among what is at or above the limit."""
    kept, token = tempered.kept(limit), np.empty(len(limit), dtype=np.int64)
    for rows, values in kept.padded():
        weight = torch.from_numpy(values - tempered.best[rows, None]).exp_().double()
        place, _ = search(weight, uniform[torch.from_numpy(rows)], None)
        token[rows] = kept.ids(rows, place.numpy())
    return token


def _draw_any(tempered: _Tempered, limit: Floats, uniform: torch.Tensor) -> Ints:
    """Among all, in two steps: a running sum over a whole vocabulary would cost as much as all the rest."""
    weight = tempered.weights()
    block, before = search(weight.sum(-1).double(), uniform, None)
    inside = weight[torch.arange(len(block)), block].double()
    return (block * BLOCK + search(inside, uniform, before)[0]).numpy()
