"""Adapters on the device: their matrices in slots, one pair of tensors for each linear layer of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.adapters.targets import PARTS, Site, Target, targets
from engine.adapters.weights import Adapter
from engine.models.config import ModelConfig
from kernels.lora import LoraBatch, LoraLayer, lora_batch

#: Where a layer is: what it is, and in which decoder layer; None outside of them.
Place = tuple[Site, int | None]


class DeviceAdapters:
    """Slots of `max_loras` adapters. A layer takes memory from the first adapter on that changes it.

    Attributes:
        ranks: of the adapter in each slot, 0 where there is none.
    """

    def __init__(
        self, config: ModelConfig, count: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._targets = targets(config)
        self._count, self._max_rank, self._dtype, self._device = count, max_rank, dtype, device
        self._layers: dict[Place, LoraLayer] = {}
        self._changed: list[frozenset[Place]] = [frozenset()] * count
        self.ranks = [0] * count

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        tensors = [tensor for layer in self._layers.values() for tensor in (layer.a, layer.b)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, over what is there. Its rank is at most the slots'."""
        for place in self._changed[slot]:
            layer = self._layers[place]
            layer.a[slot].zero_()
            layer.b[slot].zero_()
        self._changed[slot] = frozenset()
        self.ranks[slot] = 0
        for module, part in adapter.parts.items():
            target = self._targets[module]
            layer = self._layer(target)
            rank = part.a.shape[0]
            a = part.a.T if target.site == "embedding" else part.a
            if target.site == "embedding":
                layer.a[slot, 0, :, :rank] = a
            else:
                layer.a[slot, target.part, :rank] = a
            layer.b[slot, :rank, target.first : target.first + target.outputs] = part.b.T
        self._changed[slot] = frozenset(_place(self._targets[module]) for module in adapter.parts)
        self.ranks[slot] = adapter.rank

    def layer(self, site: Site, index: int | None) -> LoraLayer | None:
        """The slots of a layer; None where no adapter on the device changes it."""
        place = (site, index)
        return self._layers[place] if any(place in changed for changed in self._changed) else None

    def batch(self, slots: Sequence[int]) -> LoraBatch | None:
        """What a pass must know of its rows' slots; None where all are of the base model."""
        return lora_batch(slots, self.ranks, self._device)

    def _layer(self, target: Target) -> LoraLayer:
        place = _place(target)
        if place not in self._layers:
            self._layers[place] = self._allocate(place)
        return self._layers[place]

    def _allocate(self, place: Place) -> LoraLayer:
        members = sorted((t for t in self._targets.values() if _place(t) == place), key=lambda t: t.part)
        widths, inputs = tuple(member.outputs for member in members), members[0].inputs
        shape = (PARTS[place[0]], self._max_rank, inputs)
        if place[0] == "embedding":
            shape = (1, inputs, self._max_rank)  # a row for each token
        a = torch.zeros((self._count, *shape), dtype=self._dtype, device=self._device)
        b = torch.zeros((self._count, self._max_rank, sum(widths)), dtype=self._dtype, device=self._device)
        return LoraLayer(a, b, widths)


def _place(target: Target) -> Place:
    return target.site, target.layer
