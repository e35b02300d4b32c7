"""Logits divided by temperature, of which only the blocks that matter are looked at: their maxima tell which.

What is done for a row depends on that row alone, and so does each result: a sum in float64 that goes from token to
token, or from block to block, does not change where zeros follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.blocked import BLOCK, BlockedLogits

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

OFF = float("-inf")

#: Logits whose weights are in memory at once, unless those of a row are more.
_AT_ONCE = 1 << 20

#: Rows that keep more tokens are not padded together with rows that keep fewer.
_FEW = 1024

#: Maxima up to this need not be subtracted: e to this power times a vocabulary is a float32, and what is lost below
#: the least float32 is less than a part in 10^19 of the maximum's weight.
_UNSHIFTED = 60.0


def pairs(marked: Bools) -> tuple[Ints, Ints]:
    """Row and column of all that is marked in a matrix, in order."""
    return np.divmod(np.flatnonzero(marked), marked.shape[1])


def take(x: BlockedLogits, rows: Ints, blocks: Ints) -> torch.Tensor:
    """[n, BLOCK], a copy: the blocks of these [n] numbers, each of its row."""
    return x.values.view(-1, BLOCK).index_select(0, torch.from_numpy(rows * x.peaks.shape[1] + blocks))


@dataclass(frozen=True, slots=True)
class Kept:
    """Some tokens of each row, row by row and in order of their ids.

    Attributes:
        counts: [rows].
        values: [tokens], logits divided by temperature.
        blocks: [blocks looked at], their numbers.
        places: [tokens], in these blocks end to end.
    """

    counts: Ints
    values: Floats
    blocks: Ints
    places: Ints

    def padded(self) -> Iterator[tuple[Ints, Floats]]:
        """The values, [some rows, most], padded with -inf on the right; with those rows' numbers."""
        many = self.counts > _FEW
        for mine in (~many, many):
            rows = np.flatnonzero(mine)
            if len(rows):
                counts = self.counts[rows]
                values = np.full((len(rows), counts.max()), OFF, dtype=np.float32)
                all_rows = len(rows) == len(mine)
                own = self.values if all_rows else self.values[np.repeat(mine, self.counts)]
                values[np.arange(values.shape[1]) < counts[:, None]] = own
                yield rows, values

    def ids(self, rows: Ints, order: Ints) -> Ints:
        """Token ids, by row and order within the row; the two are broadcast."""
        place = self.places[(np.cumsum(self.counts) - self.counts)[rows] + order]
        return self.blocks[place // BLOCK] * BLOCK + place % BLOCK


@dataclass(frozen=True, slots=True)
class Tempered:
    """Some rows of logits, which are divided by their temperature where they are looked at.

    Division by a positive number keeps the order, so the maximum of the quotients is the quotient of the maximum.

    Attributes:
        x: the logits.
        rows: [n] which rows.
        scale: [n] their temperatures.
        best: [n] maxima of the quotients; finite.
    """

    x: BlockedLogits
    rows: Ints
    scale: Floats
    best: Floats

    @classmethod
    def of(cls, x: BlockedLogits, temperature: torch.Tensor | None = None) -> Tempered:
        """All rows, with their [rows] temperatures; None is 1."""
        best = x.best.numpy()
        scale = np.ones_like(best) if temperature is None else temperature.numpy()
        return cls(x, np.arange(len(best)), scale, best / scale)

    def pick(self, places: Ints) -> Tempered:
        """Some of these rows, ascending, each once."""
        if len(places) == len(self.rows):
            return self
        return Tempered(self.x, self.rows[places], self.scale[places], self.best[places])

    def peaks(self) -> Floats:
        """[n, blocks]: maxima of the blocks' quotients."""
        # torch divides here and below: it does not warn where the least logits overflow to -inf.
        return (self.x.peaks[torch.from_numpy(self.rows)] / torch.from_numpy(self.scale).unsqueeze(1)).numpy()

    def kept(self, limit: Floats) -> Kept:
        """What is at or above the [n] limit."""
        row, block = pairs(self.peaks() >= limit[:, None])
        values = take(self.x, self.rows[row], block).div_(torch.from_numpy(self.scale[row]).unsqueeze(1)).numpy()
        kept = values >= limit[row, None]
        places = np.flatnonzero(kept)
        counts = np.bincount(row[places // BLOCK], minlength=len(limit))
        return Kept(counts, values.reshape(-1)[places], block, places)

    def shift(self) -> Floats:
        """[n]: what is subtracted from quotients before e is raised to them, so that nothing overflows."""
        return np.where(np.abs(self.best) <= _UNSHIFTED, np.float32(0.0), self.best)

    def masses(self) -> torch.Tensor:
        """[n] float64: the sum of all weights, within a block first, then block by block."""
        sums = [self.pick(some).weights().sum(-1) for some in self._parts()]
        return torch.cat(sums).double().cumsum(-1)[:, -1]

    def _parts(self) -> list[Ints]:
        """Places of some rows at a time.

        Memory for all rows' weights, beside their logits', would go back to the system and be taken anew at each step.
        """
        size, count = max(1, _AT_ONCE // self.x.values.shape[1]), len(self.rows)
        return [np.arange(first, min(first + size, count)) for first in range(0, count, size)]

    def _logits(self) -> torch.Tensor:
        """[n, blocks, BLOCK], not to be changed."""
        first, end = int(self.rows[0]), int(self.rows[-1]) + 1
        if end - first == len(self.rows):  # rows ascend
            return self.x.blocks[first:end]
        return self.x.select(self.rows.tolist()).blocks

    def weights(self) -> torch.Tensor:
        """exp(quotient - shift) of all tokens, [n, blocks, BLOCK], of at least one row."""
        logits, shift = self._logits(), self.shift()
        # Each operation is a pass over all logits.
        values = logits
        if (self.scale != 1.0).any():
            values = values / torch.from_numpy(self.scale).view(-1, 1, 1)
        if shift.any():
            values = values - torch.from_numpy(shift).view(-1, 1, 1)
        return values.exp() if values is logits else values.exp_()

    def weights_of(self, values: Floats) -> torch.Tensor:
        """exp(quotient - shift) of [n, m] quotients, in float64."""
        return torch.from_numpy(values - self.shift()[:, None]).exp_().double()
