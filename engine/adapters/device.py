"""Adapters on the device: their matrices in slots, one pair of tensors for each linear layer of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.adapters.targets import PARTS, Site, Target, targets
from engine.adapters.weights import Adapter
from engine.models.config import ModelConfig
from kernels.lora import Ints, LoraBatch, LoraLayer, LoraPass, lora_batch

#: Where a layer is: what it is, and in which decoder layer; None outside of them.
Place = tuple[Site, int | None]


class DeviceAdapters:
    """Slots of `max_loras` adapters. A layer takes memory from the first adapter on that changes it."""

    def __init__(
        self, config: ModelConfig, count: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._targets = targets(config)
        self._count, self._max_rank, self._dtype, self._device = count, max_rank, dtype, device
        self._layers: dict[Place, LoraLayer] = {}
        self._version = 0

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        tensors = [tensor for layer in self._layers.values() for tensor in (layer.a, layer.b)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, over what is there. Its rank is at most the slots'."""
        for layer in self._layers.values():
            if layer.ranks[slot]:
                layer.a[slot].zero_()
                layer.b[slot].zero_()
                layer.ranks[slot] = 0
        for module, part in adapter.parts.items():
            target = self._targets[module]
            layer = self._layer(target)
            rank = part.a.shape[0]
            if target.site == "embedding":
                layer.a[slot, 0, :, :rank] = part.a.T
            else:
                layer.a[slot, target.part, :rank] = part.a
            layer.b[slot, :rank, target.first : target.first + target.outputs] = part.b.T
            layer.ranks[slot] = max(layer.ranks[slot], rank)

    def changes(self, site: Site) -> bool:
        """Whether some adapter has changed the layers of a kind so far."""
        return any(place[0] == site for place in self._layers)

    def batch(self, slots: Sequence[int] | Ints) -> LoraBatch | None:
        """Which adapter each row uses; None where all are of the base model."""
        return lora_batch(slots, self._device)

    def forward(self, batch: LoraBatch) -> LoraPass:
        """What a pass over the batch needs."""
        return LoraPass(self._layers, self._version, batch)  # type: ignore[arg-type]

    def _layer(self, target: Target) -> LoraLayer:
        place = (target.site, target.layer)
        layer = self._layers.get(place)
        if layer is None:
            layer = self._layers[place] = self._allocate(target)
            self._version += 1
        return layer

    def _allocate(self, target: Target) -> LoraLayer:
        members = [t for t in self._targets.values() if (t.site, t.layer) == (target.site, target.layer)]
        widths = np.array([member.outputs for member in sorted(members, key=lambda t: t.part)], dtype=np.int64)
        shape = (PARTS[target.site], self._max_rank, target.inputs)
        if target.site == "embedding":
            shape = (1, target.inputs, self._max_rank)  # a row for each token
        a = torch.zeros((self._count, *shape), dtype=self._dtype, device=self._device)
        b = torch.zeros((self._count, self._max_rank, int(widths.sum())), dtype=self._dtype, device=self._device)
        return LoraLayer(a, b, np.zeros(self._count, dtype=np.int64), widths)
