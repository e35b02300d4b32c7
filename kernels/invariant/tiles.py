"""Calls on tiles of few sizes that were shown to give equal bits, in place of one call with the batch's own shape.

How a library sums the terms of a matrix product depends on the product's shape: other kernels and other blockings for
other numbers of rows. With the shape fixed, so is the order. A proof is a trial: on random rows every position of every
size must give the bits that a base size gives, whose own positions have been compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import torch

Tensors = tuple[torch.Tensor, ...]

#: From tensors [rows, ...] to tensors [rows, ...], row by row.
Run = Callable[..., Tensors]

#: A function and random inputs for it.
Trial = tuple[Run, Tensors]

#: Rows that cost as much as one more call: a linear layer of 576 by 960 takes 62 us and 6.5 us a row on two cores.
CALL_ROWS = 10

_ALIGNMENT = 64


class Tiled:
    """A function of rows, called on tiles of the given sizes alone; what is missing in the last one is zeros.

    Attributes:
        sizes: ascending, all with equal bits.
    """

    def __init__(self, run: Run, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._run = run

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Any number of rows, at least one; the inputs agree in it."""
        rows = inputs[0].shape[0]
        tiles = cover(self.sizes, rows)
        if len(tiles) == 1:
            outputs = self._run(*(_tile(x, 0, tiles[0]) for x in inputs))
            return outputs if tiles[0] == rows else tuple(output.narrow(0, 0, rows) for output in outputs)
        parts: list[Tensors] = []
        first = 0
        for size in tiles:
            parts.append(self._run(*(_tile(x, first, size) for x in inputs)))
            first += size
        return tuple(torch.cat(outputs).narrow(0, 0, rows) for outputs in zip(*parts, strict=True))


@lru_cache(maxsize=8192)
def cover(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The cheapest tiles that hold so many rows, the largest first; only the last one has room to spare."""
    whole, rest = divmod(rows, sizes[-1])
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for count in range(1, rest + 1):
        options = ((best[max(0, count - size)], size) for size in sizes)
        best.append(min((cost + size + CALL_ROWS, (*tiles, size)) for (cost, tiles), size in options))
    return (sizes[-1],) * whole + tuple(sorted(best[rest][1], reverse=True))


def _tile(x: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Rows from `first` on, zeros behind the last; aligned, where a library may choose its code by the address."""
    rows = x.shape[0]
    if first + size > rows:
        tile = x.new_zeros(size, *x.shape[1:])
        tile.narrow(0, 0, rows - first).copy_(x.narrow(0, first, rows - first))
        return tile
    tile = x if rows == size else x.narrow(0, first, size)
    if tile.data_ptr() % _ALIGNMENT == 0 and tile.is_contiguous():
        return tile
    return tile.clone(memory_format=torch.contiguous_format)


def in_tiles(run: Run, inputs: Tensors, size: int) -> Tensors:
    """The outputs for rows that are a multiple of `size`."""
    parts = [run(*(_tile(x, first, size) for x in inputs)) for first in range(0, len(inputs[0]), size)]
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def same(one: Tensors, other: Tensors) -> bool:
    """Whether all elements are equal."""
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def position_free(run: Run, inputs: Tensors, size: int) -> bool:
    """Whether rows give the same bits at each position of a tile, among other rows, and in a second call.

    Looks at the first `2 * size` rows.
    """
    expected = in_tiles(run, tuple(x.narrow(0, 0, 2 * size) for x in inputs), size)
    for first in range(size):
        found = run(*(_tile(x, first, size) for x in inputs))
        if not same(found, tuple(x.narrow(0, first, size) for x in expected)):
            return False
    return True


def agreeing(run: Run, inputs: Tensors, expected: Tensors, sizes: Iterable[int]) -> Iterator[int]:
    """Those of the sizes that give the expected bits at each of their positions."""
    for size in sizes:
        # Small sizes are tried on many tiles, so that they see as many rows as the large ones see columns.
        rows = max(size, min(len(inputs[0]), 32) // size * size)
        found = in_tiles(run, tuple(x.narrow(0, 0, rows) for x in inputs), size)
        if same(found, tuple(x.narrow(0, 0, rows) for x in expected)):
            yield size


def proven_sizes(trials: Sequence[Trial], sizes: tuple[int, ...], bases: tuple[int, ...]) -> tuple[int, ...]:
    """Tile sizes that give a row the same bits, at all their positions.

    Args:
        trials: all must give equal bits; their inputs have as many rows as the largest size, and twice a base's.
        sizes: candidates, ascending.
        bases: candidates that the others are compared with; the first whose company reaches furthest is taken. With a
            base of 1 there is no position to depend on.

    Raises:
        ValueError: not even a base gives the same bits twice.
    """
    best: tuple[int, ...] = ()
    for base in bases:
        found = _company(trials, sizes, base)
        if found and found[-1] > max(best, default=0):
            best = found
        if best and best[-1] == sizes[-1]:
            break
    if not best:
        raise ValueError("no tile size gives the same bits at each position and in each call")
    return best


def _company(trials: Sequence[Trial], sizes: tuple[int, ...], base: int) -> tuple[int, ...]:
    for run, inputs in trials:
        if not position_free(run, inputs, base):
            return ()
        sizes = tuple(agreeing(run, inputs, in_tiles(run, inputs, base), sizes))
    return sizes
