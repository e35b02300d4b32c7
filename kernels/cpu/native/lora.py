"""Native LoRA: the columns between A and B for rows in tiles by slot; the layer's own product adds the rest."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.native import library as native
from kernels.cpu.native.library import DTYPES, Batch
from kernels.cpu.native.lora_store import PackedLayer
from kernels.cpu.native.program import empty, issue, recorder
from kernels.lora import LoraBatch
from kernels.ops import register

Ints = npt.NDArray[np.int64]

#: Most rows of a tile, as in `src/lora.h`.
_TILE_ROWS = 8


@dataclass(slots=True)
class Tiles:
    """Rows of adapters by slot, in tiles; the arrays are what a batch's record points to."""

    slots: Ints
    firsts: Ints
    rows: Ints
    of_row: Ints
    active: Ints

    @classmethod
    def of(cls, batch: LoraBatch) -> Tiles:
        """Those of a batch, made once."""
        if isinstance(batch.plan, Tiles):
            return batch.plan
        rows = np.argsort(batch.slots, kind="stable")
        rows = rows[np.searchsorted(batch.slots[rows], 0) :]
        active, counts = np.unique(batch.slots[rows], return_counts=True)
        tiles = -(-counts // _TILE_ROWS)
        within = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        # Of nearly equal height, so that threads share them evenly.
        size, most = np.repeat(counts, tiles), np.repeat(tiles, tiles)
        firsts = np.repeat(np.cumsum(counts) - counts, tiles) + size * within // most
        slots = np.ascontiguousarray(batch.slots)
        plan = batch.plan = cls(np.repeat(active, tiles), np.append(firsts, len(rows)), rows, slots, active)
        return plan

    def enter(self, record: Batch) -> None:
        """Point to the tiles from a batch's record; they are to be held as long as it is used."""
        record.lora_tiles = len(self.slots)
        record.lora_slots = self.slots.ctypes.data
        record.lora_firsts = self.firsts.ctypes.data
        record.lora_rows = self.rows.ctypes.data
        record.lora_of_row = self.of_row.ctypes.data
        record.lora_groups = len(self.active)
        record.lora_active = self.active.ctypes.data


@dataclass(slots=True)
class LowRank:
    """What is between A and B of the rows' adapters, for the layer's own product to take.

    Attributes:
        record: of the operation that makes it.
        low: [rows, columns] in the model's dtype.
        layer: the adapters in their slots.
        batch: what runs at once needs to know of the rows; None while a pass is recorded.
        rows: what `batch` points into.
    """

    record: native.Lora
    low: torch.Tensor
    layer: PackedLayer
    batch: Batch | None
    rows: LoraBatch | None

    @property
    def address(self) -> int:
        """Of the record."""
        return ctypes.addressof(self.record)


@register("lora_delta", "cpu.native")
def lora_delta(x: torch.Tensor, layer: PackedLayer, batch: LoraBatch | None) -> LowRank:
    """As the reference's, for the native linear layers alone: they compute the last product while theirs is at hand.

    A row's result depends, bit for bit, on that row and its adapter alone.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    low = empty(len(x), layer.columns, x.dtype)
    record = native.Lora(
        layer.site, x.data_ptr(), layer.table.data_ptr(), low.data_ptr(), x.stride(0), layer.columns, DTYPES[x.dtype]
    )
    described = _described(len(x), batch)
    issue(record, len(x), x, low, layer.table, layer.widths, batch=described)
    return LowRank(record, low, layer, described, batch)


@register("embed_delta", "cpu.native")
def embed_delta(ids: torch.Tensor, layer: PackedLayer, batch: LoraBatch | None) -> torch.Tensor:
    """Contract of the reference."""
    width = int(layer.widths.sum())
    out = empty(len(ids), width, torch.float32)
    record = native.EmbedDelta(ids.data_ptr(), layer.table.data_ptr(), out.data_ptr(), width, DTYPES[layer.dtype])
    issue(record, len(ids), ids, layer.table, out, batch=_described(len(ids), batch))
    return out


def _described(rows: int, batch: LoraBatch | None) -> Batch | None:
    """What an operation that runs at once needs to know of the rows."""
    if recorder() is not None:
        return None
    assert batch is not None
    described = Batch(rows=rows)
    Tiles.of(batch).enter(described)
    return described
