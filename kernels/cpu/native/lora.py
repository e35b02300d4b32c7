"""Native LoRA: rows in tiles by slot, an adapter's matrices read once for all rows of a tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.native import library as native
from kernels.cpu.native.library import DTYPES, Batch
from kernels.cpu.native.program import empty, issue, recorder
from kernels.lora import LoraBatch, LoraLayer
from kernels.ops import register

Ints = npt.NDArray[np.int64]

#: Most rows of a tile, as in `src/lora.h`.
_TILE_ROWS = 8


@dataclass(slots=True)
class Tiles:
    """Rows by slot, in tiles; the arrays are what a batch's record points to."""

    slots: Ints
    firsts: Ints
    rows: Ints

    @classmethod
    def of(cls, batch: LoraBatch) -> Tiles:
        """All rows of a batch, those of the base model too. Made once."""
        if isinstance(batch.plan, Tiles):
            return batch.plan
        rows = np.argsort(batch.slots, kind="stable")
        slots, counts = np.unique(batch.slots, return_counts=True)
        tiles = -(-counts // _TILE_ROWS)
        within = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        firsts = np.repeat(np.cumsum(counts) - counts, tiles) + within * _TILE_ROWS
        plan = batch.plan = cls(np.repeat(slots, tiles), np.append(firsts, len(rows)), rows)
        return plan

    def enter(self, record: Batch) -> None:
        """Point to the tiles from a batch's record; they are to be held as long as it is used."""
        record.lora_tiles = len(self.slots)
        record.lora_slots = self.slots.ctypes.data
        record.lora_firsts = self.firsts.ctypes.data
        record.lora_rows = self.rows.ctypes.data


@register("lora_delta", "cpu.native")
def lora_delta(x: torch.Tensor, layer: LoraLayer, batch: LoraBatch | None) -> torch.Tensor:
    """Contract of the reference; a row's result depends, bit for bit, on that row and its adapter alone."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    _, parts, max_rank, inputs = layer.a.shape
    width = layer.b.shape[2]
    out = empty(len(x), width, torch.float32)
    record = native.Lora(
        x.data_ptr(),
        layer.a.data_ptr(),
        layer.b.data_ptr(),
        out.data_ptr(),
        layer.ranks.ctypes.data,
        layer.widths.ctypes.data,
        x.stride(0),
        inputs,
        width,
        parts,
        max_rank,
        DTYPES[x.dtype],
    )
    described = None
    if recorder() is None:
        assert batch is not None
        described = Batch(rows=len(x))
        Tiles.of(batch).enter(described)
    issue(record, len(x), x, layer.a, layer.b, out, batch=described)
    return out
