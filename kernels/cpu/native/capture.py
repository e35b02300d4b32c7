"""Steps that are recorded once and then run in one call: one program without adapters, and one with them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kernels.attention import AttentionBatch
from kernels.cpu.native.attention import Sequences
from kernels.cpu.native.lora import Tiles
from kernels.cpu.native.program import CaptureError, Program, recording
from kernels.lora import LoraBatch, LoraPass
from kernels.ops import register
from kernels.reference.capture import Forward, Step

logger = logging.getLogger(__name__)

#: Rows that a program has at least.
_LEAST_ROWS = 64
#: Version of the layers of adapters in a pass without adapters.
_NONE = -1


@register("capture", "cpu.native")
def capture(forward: Forward, cache: torch.Tensor) -> Step:
    """Contract of the reference: the pass is recorded for as many rows as the largest batch so far has had."""
    return _Captured(forward, cache)


@dataclass(slots=True)
class _Tape:
    """A recorded pass; `program` is None where it cannot be recorded.

    Attributes:
        rows: of its tensors.
        version: of the layers of adapters.
        inputs: tokens, positions and slots, [rows] int64 each.
        hidden: [rows, hidden], the result.
    """

    rows: int
    version: int
    inputs: list[torch.Tensor]
    hidden: torch.Tensor
    program: Program | None = None


class _Captured:
    """A forward pass as programs."""

    def __init__(self, forward: Forward, cache: torch.Tensor) -> None:
        self._forward, self._cache = forward, cache
        self._tapes: dict[bool, _Tape] = {}

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, lora: LoraPass | None
    ) -> torch.Tensor:
        rows = len(tokens)
        tape = self._tape(rows, lora)
        if tape.program is None:
            return self._forward(tokens, positions, self._cache, batch, lora)
        for target, source in zip(tape.inputs, (tokens, positions, batch.slot_mapping), strict=True):
            target[:rows] = source
        sequences = Sequences.of(batch, rows)  # held, as the tiles are, for as long as the library reads its arrays
        if lora is not None and isinstance(lora.batch, LoraBatch):
            Tiles.of(lora.batch).enter(sequences.record)
        tape.program.run(sequences.record)
        return tape.hidden[:rows]

    def _tape(self, rows: int, lora: LoraPass | None) -> _Tape:
        version = _NONE if lora is None else lora.version
        tape = self._tapes.get(lora is not None)
        if tape is None or tape.version != version or (rows > tape.rows and tape.program is not None):
            tape = self._tapes[lora is not None] = self._record(rows, version, lora)
        return tape

    def _record(self, rows: int, version: int, lora: LoraPass | None) -> _Tape:
        rows = max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
        inputs = [torch.zeros(rows, dtype=torch.int64) for _ in range(3)]
        tokens, positions, slots = inputs
        adapted = None if lora is None else LoraPass(lora.layers, version)
        try:
            with recording(rows) as taken:
                hidden = self._forward(tokens, positions, self._cache, AttentionBatch(slots), adapted)
        except CaptureError as error:
            logger.warning("the forward pass runs operation by operation: %s", error)
            return _Tape(rows, version, inputs, torch.empty(0))
        return _Tape(rows, version, inputs, hidden, taken.program())
