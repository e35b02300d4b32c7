"""A step's numbers on their way up and down: packed into one copy each way, which the host does not wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.transfer import to_device

Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]

#: Copies that may be under way at once: of the pass that runs, of the one behind it, and one to fill.
_BUFFERS = 3
_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


@dataclass(slots=True)
class _Buffer:
    """Pinned words on the host; `sent` is when the device has read them."""

    words: torch.Tensor
    view: npt.NDArray[np.int64]
    sent: torch.cuda.Event | None


class Staging:
    """Numbers of 8 bytes from the host to one buffer on the device.

    `begin`, then `put` each array, then `send`: from there on, and until the next `send`, the device has what `put`
    answered. The order of work on the device keeps a pass that still reads from seeing the next one's numbers.
    """

    def __init__(self, device: torch.device, words: int = 1 << 14) -> None:
        self._device = device
        self._used = self._wanted = self._turn = 0
        self._make(words)

    def begin(self) -> None:
        """Start anew. Waits only where the device is several passes behind."""
        if self._wanted > len(self._target):
            self._make(1 << (self._wanted - 1).bit_length())
        self._used = self._wanted = 0
        self._turn = (self._turn + 1) % _BUFFERS
        sent = self._buffers[self._turn].sent
        if sent is not None:
            sent.synchronize()

    def put(self, array: Numbers) -> torch.Tensor:
        """The array as it will be on the device; one that does not fit any more goes alone, and fits the next time."""
        size, first = array.size, self._used
        self._wanted += size
        if first + size > len(self._target):
            return to_device(array, self._device)
        self._used += size
        self._buffers[self._turn].view[first : first + size] = array.reshape(-1).view(np.int64)
        return self._target[first : first + size].view(_DTYPES[array.dtype]).view(array.shape)

    def send(self) -> None:
        """One copy of all."""
        buffer = self._buffers[self._turn]
        self._target[: self._used].copy_(buffer.words[: self._used], non_blocking=True)
        if buffer.sent is not None:
            buffer.sent.record()

    def _make(self, words: int) -> None:
        cuda = self._device.type == "cuda"
        self._buffers = []
        for _ in range(_BUFFERS):
            pinned = torch.zeros(words, dtype=torch.int64, pin_memory=cuda)
            self._buffers.append(_Buffer(pinned, pinned.numpy(), torch.cuda.Event() if cuda else None))
        self._target = torch.zeros(words, dtype=torch.int64, device=self._device)


class Download:
    """A copy of int64 numbers to the host, which begins now and is waited for later."""

    def __init__(self, numbers: torch.Tensor) -> None:
        cuda = numbers.device.type == "cuda"
        self._host = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._done = torch.cuda.Event() if cuda else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> list[int]:
        """The numbers."""
        if self._done is not None:
            self._done.synchronize()
        found: list[int] = self._host.tolist()
        return found
