"""Decodes as recorded passes: one for each of some batch sizes, over inputs that stay where they are."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from engine.adapters.device import DeviceAdapters
from engine.batch import CacheLayout, Ints, block_tables
from engine.device.capture_sizes import padded_size
from engine.device.graphs import Call, GraphBackend
from engine.device.staging import Staging
from engine.models.registry import CausalLM
from engine.plan import Span, StepPlan
from kernels.attention import DECODE_CUT, AttentionBatch, FixedDecode
from kernels.lora import FixedRows, LoraPass, most_tiles, tiled

logger = logging.getLogger(__name__)

#: Each bound on the length of sequences is so many times the one before: passes over short ones cut no keys.
_REACH_STEP = 16
#: Rows of `DecodeGraphs._fields`, and what padding has there: a token that attends to itself, in the null block.
TOKENS, POSITIONS, SLOTS, LENGTHS, ADAPTERS, ORDER = range(6)


class _Key(NamedTuple):
    """Of a recorded pass: rows, keys of a sequence at most, and whether there are adapters."""

    size: int
    reach: int
    adapted: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """Inputs of a pass, to be copied to where the recorded one reads them; tensors are there once they are sent.

    Attributes:
        rows: that are no padding.
        fields: [6, size] int64.
        tables: [rows, blocks] int64.
        tiles: [3, tiles] int64, see `FixedRows`; None where no row has an adapter.
    """

    key: _Key
    rows: int
    fields: torch.Tensor
    tables: torch.Tensor
    tiles: torch.Tensor | None


class DecodeGraphs:
    """Recorded forward passes over one token of each of some sequences.

    Batches are padded to the next size by rows that write to the null block and attend to what they have written.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: torch.Tensor,
        layout: CacheLayout,
        sizes: Sequence[int],
        max_model_len: int,
        adapters: tuple[DeviceAdapters, int] | None,
        backend: GraphBackend,
    ) -> None:
        """Make the inputs.

        Args:
            model: whose passes are recorded.
            cache: [layers, blocks, block_size, 2, kv_heads, head_dim].
            layout: of the cache.
            sizes: ascending.
            max_model_len: of a sequence.
            adapters: and their slots.
            backend: records.
        """
        self.sizes = list(sizes)
        self._model, self._cache, self._layout, self._backend = model, cache, layout, backend
        self._adapters: DeviceAdapters | None = None
        slots = 0
        if adapters is not None:
            self._adapters, slots = adapters
        width = -(-max_model_len // layout.block_size)
        self._reaches = _reaches(width * layout.block_size)
        device = model.device
        self._fields = torch.from_numpy(self._padding(sizes[-1])).to(device)
        self._tables = torch.full((sizes[-1], width), layout.null_block, dtype=torch.int64, device=device)
        self._hidden = torch.zeros((sizes[-1], model.config.hidden_size), dtype=model.dtype, device=device)
        self._tiles = {
            size: torch.zeros((3, most_tiles(size, slots)), dtype=torch.int32, device=device) for size in sizes
        }
        self._replays: dict[_Key, Call] = {}
        self._version = 0

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all passes, the largest first, so that the memory of that one serves the others."""
        began, device = time.monotonic(), self._model.device
        kinds = (False, True) if self._adapters is not None else (False,)
        gc.freeze()  # every capture collects garbage: of that, not of all that has been loaded
        try:
            for key in product(reversed(self.sizes), reversed(self._reaches), kinds):
                self._replay(_Key(*key))
        finally:
            gc.unfreeze()
        seconds = time.monotonic() - began
        logger.info(
            "%d decodes recorded on %s in %.1f s: batches of %s", len(self._replays), device, seconds, self.sizes
        )

    def serves(self, plan: StepPlan) -> bool:
        """Whether the plan is a decode of a batch that has a size."""
        return plan.decodes == len(plan.spans) <= self.sizes[-1]

    def stage(self, spans: list[Span], slots: Ints | None, staging: Staging) -> Decode:
        """Put the inputs of a pass; `slots` are the adapters' of each span, None where there is no adapter."""
        rows, size = len(spans), padded_size(self.sizes, len(spans))
        assert size is not None
        starts = np.array([span.start for span in spans], dtype=np.int64)
        tables = block_tables(spans, starts + 1, self._layout)
        block_size = self._layout.block_size
        fields = self._padding(size)
        fields[TOKENS, :rows] = [(span.sequence.tokens[span.start :] or (0,))[0] for span in spans]
        fields[POSITIONS, :rows] = starts
        fields[SLOTS, :rows] = tables[np.arange(rows), starts // block_size] * block_size + starts % block_size
        fields[LENGTHS, :rows] = starts + 1
        tiles: torch.Tensor | None = None
        if slots is not None:
            fields[ADAPTERS, :rows] = slots
            fields[ORDER], table = tiled(fields[ADAPTERS], self._tiles[size].shape[1])
            tiles = staging.put(table)
        longest = int(starts.max()) + 1
        reach = next(reach for reach in self._reaches if reach >= longest)
        key = _Key(size, reach, slots is not None)
        return Decode(key, rows, staging.put(fields), staging.put(tables), tiles)

    def run(self, decode: Decode) -> torch.Tensor:
        """[rows, hidden], valid until the next pass."""
        size = decode.key.size
        self._fields[:, :size].copy_(decode.fields)
        self._tables[: decode.rows, : decode.tables.shape[1]].copy_(decode.tables)
        # Padding reads the first entry alone, which may be left over from a larger batch.
        self._tables[decode.rows : size, :1].fill_(self._layout.null_block)
        if decode.tiles is not None:
            self._tiles[size].copy_(decode.tiles)
        self._replay(decode.key)()
        return self._hidden[: decode.rows]

    def _replay(self, key: _Key) -> Call:
        if key.adapted and self._adapters is not None and self._adapters.version != self._version:
            # Adapters change more layers than they did: what was recorded leaves these out.
            for known in [known for known in self._replays if known.adapted]:
                del self._replays[known]
            self._version = self._adapters.version
        replay = self._replays.get(key)
        if replay is None:
            replay = self._replays[key] = self._backend.capture(lambda: self._forward(key))
        return replay

    def _forward(self, key: _Key) -> None:
        """The pass that is recorded. It reads and writes nothing but what stays."""
        size = key.size
        tokens, positions, slots, lengths, adapters, order = self._fields[:, :size].unbind(0)
        lora: LoraPass | None = None
        if key.adapted and self._adapters is not None:
            lora = self._adapters.forward(FixedRows(adapters, order, self._tiles[size]))
        batch = AttentionBatch(slots, fixed=FixedDecode(lengths, self._tables[:size], key.reach))
        self._hidden[:size].copy_(self._model.forward(tokens, positions, self._cache, batch, lora))

    def _padding(self, size: int) -> Ints:
        """[6, size] of padding alone."""
        fields = np.zeros((6, size), dtype=np.int64)
        fields[SLOTS] = self._layout.null_block * self._layout.block_size
        fields[LENGTHS], fields[ADAPTERS], fields[ORDER] = 1, -1, np.arange(size)
        return fields


def _reaches(longest: int) -> list[int]:
    """Ascending bounds on the keys of a sequence."""
    found = [DECODE_CUT]
    while found[-1] < longest:
        found.append(found[-1] * _REACH_STEP)
    return [*(reach for reach in found if reach < longest), longest]
