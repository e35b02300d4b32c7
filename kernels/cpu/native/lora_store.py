"""Adapters packed once, when they are read: a slot is no more than pointers to them."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.native import library as native
from kernels.cpu.native.library import DTYPES, LoraSite
from kernels.lora import LoraShape, LoraStore, Pair, Pairs, Prepared
from kernels.ops import register

_LINE = 64
#: Fields of a slot in the table: addresses of A and B, and the rank (`LoraSlot` in `src/abi.h`).
_FIELDS = 3


@dataclass(slots=True)
class _Packed:
    """An adapter's matrices: `table` [layers, 3] points into `data`."""

    table: torch.Tensor
    data: torch.Tensor


@dataclass(slots=True)
class PackedLayer:
    """Slots of one layer.

    Attributes:
        table: [slots, 3] int64, what is in each.
        widths: [parts] int64, outputs of each part; `site` points to it.
        site: the layer.
        columns: room between A and B, for the largest rank.
        dtype: of the model.
        held: [slots] adapters that the table points into.
    """

    table: torch.Tensor
    widths: torch.Tensor
    site: LoraSite
    columns: int
    dtype: torch.dtype
    held: list[_Packed | None]


@register("lora_store", "cpu.native")
def lora_store(
    shapes: Mapping[Hashable, LoraShape], count: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoraStore:
    """Contract of the reference."""
    return PackedStore(shapes, count, max_rank, dtype)


class PackedStore(LoraStore):
    """Slots by pointer: they cost no memory besides the adapters'. One table has those of all layers."""

    def __init__(self, shapes: Mapping[Hashable, LoraShape], count: int, max_rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._shapes, self._dtype = shapes, dtype
        self._table = torch.zeros((len(shapes), count, _FIELDS), dtype=torch.int64)
        self._held: list[_Packed | None] = [None] * count
        self._all = {
            place: self._packed_layer(self._table[index], shape, max_rank)
            for index, (place, shape) in enumerate(shapes.items())
        }

    @property
    def bytes(self) -> int:
        return self._table.numel() * self._table.element_size()

    def prepare(self, pairs: Pairs) -> Prepared:
        plan = {place: self._sizes(place, parts) for place, parts in pairs.items()}
        data = _lines(sum(a + b for _, a, b in plan.values()))
        table = torch.zeros((len(self._shapes), _FIELDS), dtype=torch.int64)
        at = data.data_ptr()
        for index, place in enumerate(self._shapes):
            if place in pairs:
                rank, a_bytes, b_bytes = plan[place]
                self._pack(place, pairs[place], rank, at, at + a_bytes)
                table[index] = torch.tensor([at, at + a_bytes, rank])
                at += a_bytes + b_bytes
        return Prepared(max(rank for rank, *_ in plan.values()), len(data), _Packed(table, data))

    def fill(self, slot: int, prepared: Prepared) -> None:
        packed: _Packed = prepared.content
        self._table[:, slot] = packed.table
        self._held[slot] = packed
        for place, rank in zip(self._shapes, packed.table[:, 2].tolist(), strict=True):
            if rank and place not in self.layers:
                self.layers[place] = self._all[place]
                self.version += 1

    def _packed_layer(self, table: torch.Tensor, shape: LoraShape, max_rank: int) -> PackedLayer:
        widths = torch.tensor(shape.widths, dtype=torch.int64)
        site = LoraSite(shape.inputs, len(shape.widths), widths.data_ptr(), shape.kind == "gated")
        lanes = native.library().ropeway_panel_columns() // 2
        columns = len(shape.widths) * _even(max_rank)
        return PackedLayer(table, widths, site, columns + -columns % lanes, self._dtype, self._held)

    def _sizes(self, place: Hashable, parts: Mapping[int, Pair]) -> tuple[int, int, int]:
        """Largest rank of the parts, and bytes of packed A and B, in whole lines."""
        rank = max(a.shape[0] for a, _ in parts.values())
        site = self._all[place].site
        elements = [native.library().ropeway_lora_elements(ctypes.byref(site), rank, half) for half in (0, 1)]
        if self._shapes[place].kind == "embedding":
            elements[0] = self._shapes[place].inputs * _even(rank)
        a, b = (count * self._dtype.itemsize for count in elements)
        return rank, a + -a % _LINE, b + -b % _LINE

    def _pack(self, place: Hashable, parts: Mapping[int, Pair], rank: int, to_a: int, to_b: int) -> None:
        site, lib = self._all[place].site, native.library()
        if self._shapes[place].kind == "embedding":
            site = LoraSite(0, site.parts, site.widths, site.gated)  # of B alone
            rows = torch.nn.functional.pad(parts[0][0].T, (0, rank % 2)).contiguous()
            ctypes.memmove(to_a, rows.data_ptr(), rows.numel() * rows.element_size())
        for part, (a, b) in parts.items():
            lib.ropeway_pack_lora(
                ctypes.byref(site), part, a.data_ptr(), b.data_ptr(), a.shape[0], rank, DTYPES[self._dtype], to_a, to_b
            )


def _even(rank: int) -> int:
    return rank + rank % 2


def _lines(size: int) -> torch.Tensor:
    """Zero bytes from the beginning of a line of the cache on."""
    raw = np.empty(size + _LINE, dtype=np.uint8)
    raw[:] = 0
    skip = -raw.ctypes.data % _LINE
    return torch.from_numpy(raw)[skip : skip + size]
