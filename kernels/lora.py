"""What the LoRA operation needs: adapters of each layer in slots, and which rows of a batch use which slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kernels.transfer import to_device

Ints = npt.NDArray[np.int64]


#: One module's adapter: a [rank, inputs], b [outputs, rank], scaled. An embedding's inputs are its tokens.
Pair = tuple[torch.Tensor, torch.Tensor]
#: An adapter's, by the layer's place in the model and the part of the layer.
Pairs = Mapping[Hashable, Mapping[int, Pair]]


@dataclass(frozen=True, slots=True)
class LoraShape:
    """A layer that adapters may change.

    Attributes:
        inputs: width of its input; of an embedding, its tokens.
        widths: outputs of each part of a fused layer.
        kind: what computes it; a gated layer has two parts.
    """

    inputs: int
    widths: tuple[int, ...]
    kind: Literal["linear", "gated", "embedding"] = "linear"


@dataclass(slots=True)
class Prepared:
    """An adapter as its store takes it.

    Attributes:
        rank: the largest of its parts.
        bytes: memory of it.
        content: the store's own.
    """

    rank: int
    bytes: int
    content: Any


class LoraStore(ABC):
    """Slots of adapters as a backend's `lora_delta` and `embed_delta` want them; its `lora_store` makes one.

    Attributes:
        layers: slots of each layer, by its place; a layer is absent until an adapter changes it.
        version: rises when `layers` gets more of them.
    """

    def __init__(self) -> None:
        self.layers: dict[Hashable, Any] = {}
        self.version = 0

    @abstractmethod
    def prepare(self, pairs: Pairs) -> Prepared:
        """An adapter as `fill` takes it; in any thread, so that `fill` is quick. Ranks are at most the slots'."""

    @abstractmethod
    def fill(self, slot: int, prepared: Prepared) -> None:
        """Put an adapter into a slot, over what is there."""

    def reserve(self, places: Iterable[Hashable]) -> None:  # noqa: B027 - most stores have nothing to take
        """Take the memory of layers before an adapter changes them, where there is any to take."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory of all slots, besides that of the adapters that were prepared."""


@dataclass(slots=True)
class LoraLayer:
    """Slots of one linear layer, which may be several modules fused, its parts.

    Attributes:
        a: [slots, parts, max_rank, inputs]; rows above an adapter's own rank, and parts that it lacks, are zeros.
        b: [slots, max_rank, outputs], scaled; zeros likewise.
        ranks: [slots] on the host, of the adapter in each slot in this layer; 0 where it leaves the layer as it is.
        widths: [parts] on the host, outputs of each part; together they are all outputs.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: Ints
    widths: Ints


@dataclass(slots=True)
class LoraBatch:
    """Rows of a batch by slot. A batch without any row of an adapter has none of this.

    Attributes:
        slots: [tokens] on the host, slot of each row, -1 for the base model.
        active: [groups] on the host, the slots that occur.
        gather: [groups * size] int64, rows of each group one after the other, padded with any row.
        valid: [rows] int64, positions in `gather` that are not padding.
        rows: [rows] int64, the row at each of `valid`.
        plan: what a backend works out in the first layer for all layers.
    """

    slots: Ints
    active: Ints
    gather: torch.Tensor
    valid: torch.Tensor
    rows: torch.Tensor
    plan: object = None


#: Rows of one adapter that a backend may compute together: see `FixedRows.tiles`.
TILE_ROWS = 16


@dataclass(slots=True)
class FixedRows:
    """Rows of a batch by slot, described on the device alone: a recorded pass reads it anew each time.

    Attributes:
        slots: [rows] int64, slot of each row, -1 for the base model.
        order: [rows] int64, the rows by slot, those of the base model anywhere behind the others.
        tiles: [3, tiles] int32, contiguous: slot, place in `order` of the first row, and number of rows, at most
            `TILE_ROWS`, of rows of one slot that are neighbours in `order`; zeros where there are fewer tiles.
    """

    slots: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor


def most_tiles(rows: int, slots: int) -> int:
    """Tiles that so many rows with so many slots can fall into."""
    return min(rows, slots + rows // TILE_ROWS)


def tiled(slots: Ints, tiles: int) -> tuple[Ints, Ints]:
    """`FixedRows.order` and `FixedRows.tiles` of rows with these slots, on the host."""
    order = np.argsort(np.where(slots < 0, np.iinfo(np.int64).max, slots), kind="stable")
    found, counts = np.unique(slots[slots >= 0], return_counts=True)
    pieces = -(-counts // TILE_ROWS)
    of_tile = np.repeat(np.arange(len(found)), pieces)
    within = (np.arange(len(of_tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * TILE_ROWS
    table = np.zeros((3, tiles), dtype=np.int64)
    table[0, : len(of_tile)] = found[of_tile]
    table[1, : len(of_tile)] = (np.cumsum(counts) - counts)[of_tile] + within
    table[2, : len(of_tile)] = np.minimum(TILE_ROWS, counts[of_tile] - within)
    return order, table


@dataclass(slots=True)
class LoraPass:
    """What a forward pass needs of adapters.

    Attributes:
        layers: of the store, by place in the model; a layer that no adapter has changed so far is absent.
        version: rises when `layers` gets more of them.
        batch: rows of the pass; None while a pass is recorded.
    """

    layers: Mapping[Hashable, Any]
    version: int = 0
    batch: LoraBatch | FixedRows | None = field(default=None)


def lora_batch(slots: Sequence[int] | Ints, device: torch.device) -> LoraBatch | None:
    """The batch whose rows use these slots; None where all are -1.

    Args:
        slots: of each row.
        device: of the model.
    """
    of_rows = np.asarray(slots, dtype=np.int64)
    rows = np.flatnonzero(of_rows >= 0)
    if not len(rows):
        return None
    rows = rows[np.argsort(of_rows[rows], kind="stable")]
    active, counts = np.unique(of_rows[rows], return_counts=True)
    size = int(counts.max())
    firsts = np.cumsum(counts) - counts
    offsets = np.arange(len(rows)) - np.repeat(firsts, counts)
    valid = np.repeat(np.arange(len(active)) * size, counts) + offsets
    gather = np.full(len(active) * size, rows[0])
    gather[valid] = rows
    return LoraBatch(
        slots=of_rows,
        active=active,
        gather=to_device(gather, device),
        valid=to_device(valid, device),
        rows=to_device(rows, device),
    )
