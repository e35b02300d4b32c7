"""LoRA: few rows of several adapters, limited by the adapters' memory, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.measure import Case, Place, close
from kernels.lora import LoraLayer, lora_batch
from kernels.ops import Ops


def cases(place: Place, ops: Ops) -> Iterator[Callable[[], Case]]:
    """All of the section; rows, adapters and rank."""
    sizes = (
        [(3, 2, 8)] if place.tiny else [(1, 1, 16), (64, 1, 16), (64, 8, 16), (64, 8, 64), (256, 32, 16), (4096, 4, 16)]
    )
    for rows, adapters, rank in sizes:
        yield partial(_delta, place, ops, rows, adapters, rank)


def _delta(place: Place, ops: Ops, rows: int, adapters: int, rank: int) -> Case:
    inputs, widths = place.size(4096, 40), np.array([4096, 1024, 1024] if not place.tiny else [24, 8, 8])
    outputs = int(widths.sum())
    layer = LoraLayer(
        place.randn(adapters, 3, rank, inputs) * inputs**-0.5,
        place.randn(adapters, rank, outputs),
        np.full(adapters, rank),
        widths,
    )
    slots = np.arange(rows) * adapters // rows
    batch = lora_batch(slots, place.device)
    assert batch is not None
    x = place.randn(rows, inputs)

    def check() -> None:
        delta = ops.lora_delta(x, layer, batch)
        for row in range(0, rows, max(1, rows // 16)):
            low = layer.a[slots[row]].double() @ x[row].double()  # [parts, rank]
            each = zip(low, layer.b[slots[row]].double().split(widths.tolist(), 1), strict=True)
            # The inner result is rounded to the adapters' dtype, its errors are independent of each other.
            close(delta[row], torch.cat([part @ b for part, b in each]), 2.0**-7, 2.0**-6)

    weights = adapters * rank * (3 * inputs + outputs) * 2
    moved = weights + rows * (2 * inputs + 8 * outputs)  # the result is zeroed first
    flops = 2.0 * rows * rank * (3 * inputs + outputs)
    return Case(
        f"lora {rows} rows, {adapters} adapters of rank {rank}",
        lambda: ops.lora_delta(x, layer, batch),
        check,
        bytes=moved,
        flops=flops,
    )
