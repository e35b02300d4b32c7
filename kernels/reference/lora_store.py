"""Adapters in slots that are copies, in one pair of tensors for each layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import numpy as np
import torch

from kernels.lora import LoraLayer, LoraShape, LoraStore, Pairs, Prepared
from kernels.ops import register


@register("lora_store", "reference")
def lora_store(
    shapes: Mapping[Hashable, LoraShape], count: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoraStore:
    """Empty slots.

    Args:
        shapes: of the layers that adapters may change, by place.
        count: slots.
        max_rank: largest rank of an adapter.
        dtype: of the model.
        device: of the model.
    """
    return DenseStore(shapes, count, max_rank, dtype, device)


class DenseStore(LoraStore):
    """A layer takes memory from the first adapter on that changes it."""

    def __init__(
        self,
        shapes: Mapping[Hashable, LoraShape],
        count: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._shapes, self._count, self._max_rank, self._dtype, self._device = shapes, count, max_rank, dtype, device

    @property
    def bytes(self) -> int:
        tensors = [tensor for layer in self.layers.values() for tensor in (layer.a, layer.b)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def prepare(self, pairs: Pairs) -> Prepared:
        if self._device.type == "cuda":  # so that nobody waits while a slot is filled
            pairs = {
                place: {part: (a.pin_memory(), b.pin_memory()) for part, (a, b) in parts.items()}
                for place, parts in pairs.items()
            }
        tensors = [tensor for parts in pairs.values() for pair in parts.values() for tensor in pair]
        rank = max(a.shape[0] for parts in pairs.values() for a, _ in parts.values())
        return Prepared(rank, sum(tensor.numel() * tensor.element_size() for tensor in tensors), pairs)

    def fill(self, slot: int, prepared: Prepared) -> None:
        for layer in self.layers.values():
            if layer.ranks[slot]:
                layer.a[slot].zero_()
                layer.b[slot].zero_()
                layer.ranks[slot] = 0
        for place, parts in prepared.content.items():
            layer, shape = self._layer(place), self._shapes[place]
            for part, (a, b) in parts.items():
                rank, first = a.shape[0], sum(shape.widths[:part])
                if shape.kind == "embedding":
                    _copy(layer.a[slot, 0, :, :rank], a, transposed=True)
                else:
                    _copy(layer.a[slot, part, :rank], a)
                _copy(layer.b[slot, :rank, first : first + shape.widths[part]], b, transposed=True)
                layer.ranks[slot] = max(layer.ranks[slot], rank)

    def reserve(self, places: Iterable[Hashable]) -> None:
        for place in places:
            self._layer(place)

    def _layer(self, place: Hashable) -> LoraLayer:
        if place not in self.layers:
            self.layers[place] = self._allocate(self._shapes[place])
            self.version += 1
        layer: LoraLayer = self.layers[place]
        return layer

    def _allocate(self, shape: LoraShape) -> LoraLayer:
        parts = len(shape.widths)
        columns = (parts, self._max_rank, shape.inputs)
        if shape.kind == "embedding":
            columns = (1, shape.inputs, self._max_rank)  # a row for each token
        a = torch.zeros((self._count, *columns), dtype=self._dtype, device=self._device)
        b = torch.zeros((self._count, self._max_rank, sum(shape.widths)), dtype=self._dtype, device=self._device)
        return LoraLayer(a, b, np.zeros(self._count, dtype=np.int64), np.array(shape.widths, dtype=np.int64))


def _copy(target: torch.Tensor, source: torch.Tensor, *, transposed: bool = False) -> None:
    """Into a slot; transposed on the device, since what is transposed on the host is not copied in one piece."""
    if source.device != target.device:
        source = source.to(target.device, non_blocking=True)
    target.copy_(source.T if transposed else source)
