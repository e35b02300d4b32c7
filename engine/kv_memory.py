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
