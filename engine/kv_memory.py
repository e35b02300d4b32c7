"""Memory of the KV cache."""

from __future__ import annotations

import math

import numpy as np
import torch

#: Bytes of a large page, where the system has them, and of a small one.
_LARGE, _SMALL = 2 * 1024 * 1024, 4096


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[layers, ...] of zeros, because padding may be read and then masked: what was never written must be finite.

    On a CPU memory is taken where it is first written to, in large pages if the system has them: NumPy asks for both.
    Layers are filled side by side, and to get a large page takes up to milliseconds. So layers begin at different
    places of one: else all of them would come to its end in the same pass.

    Returns:
        Each layer contiguous.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    layers, size = shape[0], math.prod(shape[1:]) * dtype.itemsize
    stride = _staggered(size, layers)
    memory = torch.from_numpy(np.zeros(layers * stride, dtype=np.uint8))
    return memory.view(layers, stride)[:, :size].view(dtype).unflatten(1, shape[1:])


def _staggered(size: int, layers: int) -> int:
    """Bytes from one layer to the next: beyond whole large pages a part of one, so that all layers' parts are spread
    over a page evenly; no more than the size where that is less than a page."""
    if size < _LARGE:
        return size
    part = max(_SMALL, _LARGE // layers // _SMALL * _SMALL)
    return size + (part - size) % _LARGE


class TakenAhead:
    """Has the system give memory before it is needed: a page's worth of each layer at once, then one layer's with each
    pass, so that there is always so much ahead of what sequences hold.

    A sequence's blocks are set aside when it is admitted. So the next block of another may lie far ahead, in new pages
    of most layers, which one pass would have to wait for.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        """Of a cache on a CPU, as `zeros` makes it; what it holds does not change."""
        self._layers = [layer.view(-1).view(torch.uint8) for layer in cache.unbind(0)]
        self._block = self._layers[0].numel() // cache.shape[1]
        self._part = -(-_LARGE // self._block)
        self._blocks, self._taken, self._layer = cache.shape[1], 0, 0
        while not self._taken:
            self._take()

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to take."""
        return self._taken >= self._blocks

    def advance(self, block: int) -> None:
        """Before a pass: the largest number of a block that sequences hold."""
        if block >= self._taken + self._part:
            self._taken, self._layer = block + 1, 0
        if not self.complete and block + self._part >= self._taken:
            self._take()

    def _take(self) -> None:
        first = self._taken * self._block
        # To write is what takes a page; to add 0 leaves it as it is.
        self._layers[self._layer][first : first + self._part * self._block : _SMALL].add_(0)
        self._layer += 1
        if self._layer == len(self._layers):
            self._taken, self._layer = self._taken + self._part, 0


def taken_ahead(cache: torch.Tensor) -> TakenAhead | None:
    """For a cache on a CPU that is larger than a page for each layer."""
    large = cache.device.type == "cpu" and cache[0].numel() * cache.itemsize > _LARGE
    return TakenAhead(cache) if large else None
