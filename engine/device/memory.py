"""How many KV blocks a device has room for: what the largest pass leaves of the share that may be used."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_GIB = 1024**3


class DeviceMemoryError(ValueError):
    """The device has no room for what is asked of it; the message says how much is missing and what to change."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes.

    Attributes:
        total: of the device.
        free: that nobody has.
        reserved: that this process's tensors have, or have had and could have again.
        peak: most that this process's tensors had at once since `DeviceMemory.start`.
    """

    total: int
    free: int
    reserved: int
    peak: int


class DeviceMemory(Protocol):
    """Memory of one device."""

    def start(self) -> None:
        """Give back what no tensor has; the peak counts from here on."""

    def read(self) -> MemoryReading:
        """As it is when all work has been done; what no tensor has is given back."""


class CudaMemory:
    """As torch and the driver tell it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        self._give_back()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        torch.cuda.synchronize(self._device)
        self._give_back()
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            total, free, torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_allocated(self._device)
        )

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None for a CPU, whose memory is not the engine's alone."""
    return CudaMemory(device) if device.type == "cuda" else None


def count_blocks(memory: DeviceMemory, utilization: float, block_bytes: int, run: Callable[[], int]) -> int:
    """KV blocks that fit.

    Args:
        memory: of the device, on which all is that stays but the KV cache.
        utilization: share of all memory that may be used, by others too.
        block_bytes: of a KV block.
        run: runs the largest pass, over a KV cache of its own whose bytes it answers.

    Raises:
        DeviceMemoryError: not even one.
    """
    memory.start()
    try:
        own = run()
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            "the largest pass does not fit beside the weights: lower max_num_batched_tokens or max_num_seqs, or take a "
            "smaller model"
        ) from error
    found = memory.read()
    budget = int(found.total * utilization)
    others = max(0, found.total - found.free - found.reserved)
    left = budget - (found.peak - own) - others
    if left >= block_bytes:
        return left // block_bytes
    raise DeviceMemoryError(
        f"no room for a KV cache: gpu_memory_utilization {utilization:g} of {_gib(found.total)} is {_gib(budget)}; "
        f"weights and the largest pass take {_gib(found.peak - own)}, libraries and other processes {_gib(others)}, a "
        f"block {_gib(block_bytes)}: {_gib(block_bytes - left)} are missing. Raise gpu_memory_utilization, lower "
        "max_num_batched_tokens, max_num_seqs or max_loras, or take a smaller model"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
