"""Layers of adapters for every backend, from the reference's tensors."""

from __future__ import annotations

from typing import Any

import torch

from kernels.lora import LoraLayer, LoraShape
from kernels.ops import NATIVE, implementation


def layer_for(backend: str, layer: LoraLayer, kind: Any = "linear") -> Any:
    """The layer as the backend's operations take it."""
    if backend != NATIVE:
        return layer
    make = implementation("lora_store", backend)
    assert make is not None
    slots, _, max_rank, inputs = layer.a.shape
    if kind == "embedding":
        max_rank, inputs = inputs, max_rank
    shape = LoraShape(inputs, tuple(layer.widths.tolist()), kind)
    store = make({"layer": shape}, slots, max_rank, layer.a.dtype, torch.device("cpu"))
    for slot, rank in enumerate(layer.ranks.tolist()):
        if rank:
            store.fill(slot, store.prepare({"layer": _pairs(layer, slot, rank, kind)}))
    return store.layers.get("layer", store._all["layer"])


def _pairs(layer: LoraLayer, slot: int, rank: int, kind: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    pairs, first = {}, 0
    for part, width in enumerate(layer.widths.tolist()):
        a = layer.a[slot, 0, :, :rank].T if kind == "embedding" else layer.a[slot, part, :rank]
        pairs[part] = (a.contiguous(), layer.b[slot, :rank, first : first + width].T.contiguous())
        first += width
    return pairs
