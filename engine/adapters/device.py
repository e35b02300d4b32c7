"""Adapters on the device: which layers of the model they change, and the slots that the kernels keep them in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.adapters.targets import Site, Target, targets
from engine.adapters.weights import Adapter
from engine.models.config import ModelConfig
from kernels.lora import FixedRows, Ints, LoraBatch, LoraPass, LoraShape, LoraStore, Pair, lora_batch
from kernels.ops import Ops

#: Where a layer is: what it is, and in which decoder layer; None outside of them.
Place = tuple[Site, int | None]


class DeviceAdapters:
    """Slots of `count` adapters."""

    def __init__(
        self, config: ModelConfig, ops: Ops, count: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._targets, self._device = targets(config), device
        self._last: LoraBatch | None = None
        self._store: LoraStore = ops.lora_store(_shapes(self._targets.values()), count, max_rank, dtype, device)

    @property
    def bytes(self) -> int:
        """Memory of all slots, besides that of adapters in memory."""
        return self._store.bytes

    def prepare(self, adapter: Adapter) -> Adapter:
        """The adapter as `fill` takes it, without its parts. Called in the thread that reads it."""
        pairs: dict[Place, dict[int, Pair]] = {}
        for module, part in adapter.parts.items():
            target = self._targets[module]
            pairs.setdefault((target.site, target.layer), {})[target.part] = (part.a, part.b)
        return Adapter(adapter.identity, adapter.rank, {}, self._store.prepare(pairs))  # type: ignore[arg-type]

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Put a prepared adapter into a slot, over what is there. Its rank is at most the slots'."""
        if adapter.prepared is None:
            raise ValueError(f"adapter {adapter.identity} is not prepared")
        self._store.fill(slot, adapter.prepared)

    def changes(self, site: Site) -> bool:
        """Whether some adapter has changed the layers of a kind so far."""
        return any(place[0] == site for place in self._store.layers)  # type: ignore[index]

    def batch(self, slots: Sequence[int] | Ints) -> LoraBatch | None:
        """Which adapter each row uses; None where all are of the base model. Decodes often use the same as before."""
        last = self._last
        if last is None or not np.array_equal(last.slots, slots):
            last = self._last = lora_batch(slots, self._device)
        return last

    @property
    def version(self) -> int:
        """Rises when adapters change a layer that none has changed so far."""
        return self._store.version

    def reserve(self) -> None:
        """Take the memory of all layers that adapters usually change, before any does: linear ones of the decoder."""
        self._store.reserve([place for place in _shapes(self._targets.values()) if place[1] is not None])

    def forward(self, batch: LoraBatch | FixedRows) -> LoraPass:
        """What a pass over the batch needs."""
        return LoraPass(self._store.layers, self._store.version, batch)


def _shapes(found: Iterable[Target]) -> dict[Place, LoraShape]:
    """Of each layer, its parts in their order."""
    members: dict[Place, list[Target]] = {}
    for target in found:
        members.setdefault((target.site, target.layer), []).append(target)
    shapes = {}
    for place, parts in members.items():
        kind = place[0] if place[0] in ("gated", "embedding") else "linear"
        widths = tuple(part.outputs for part in sorted(parts, key=lambda target: target.part))
        shapes[place] = LoraShape(parts[0].inputs, widths, kind)
    return shapes
