"""Steps that are recorded once and then run in one call: one program without adapters, and one with them."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable

import torch

from kernels.attention import AttentionBatch
from kernels.cpu.native.attention import Sequences
from kernels.cpu.native.lora import Tiles
from kernels.cpu.native.program import CaptureError, Program, recording
from kernels.host_pass import HostPass
from kernels.lora import LoraBatch, LoraPass
from kernels.ops import register
from kernels.reference.capture import Forward, PassInputs

logger = logging.getLogger(__name__)

#: Rows that a program has at least.
_LEAST_ROWS = 64
#: Version of the layers of adapters in a pass without adapters.
_NONE = -1


@register("capture", "cpu.native")
def capture(forward: Forward, cache: torch.Tensor) -> Callable[[HostPass | PassInputs, LoraPass | None], torch.Tensor]:
    """Contract of the reference, also over numbers: recorded for as many rows as the largest pass so far has had."""
    return _Captured(forward, cache)


class _Tape:
    """A recorded pass; `program` is None where it cannot be recorded.

    Attributes:
        rows: of its tensors.
        version: of the layers of adapters.
        inputs: tokens, positions and slots, [rows] int64 each.
        hidden: [rows, hidden], the result; nothing until it is recorded.
    """

    def __init__(self, rows: int, version: int) -> None:
        self.rows, self.version = rows, version
        self.inputs = [array("q", bytes(8 * rows)) for _ in range(3)]
        self.hidden = torch.empty(0)
        self.program: Program | None = None
        self._first = self.hidden

    def first(self, rows: int) -> torch.Tensor:
        """[rows, hidden]: the same tensor as long as it is of as many rows."""
        if self._first.shape[0] != rows:
            self._first = self.hidden[:rows]
        return self._first


class _Captured:
    """A forward pass as programs."""

    def __init__(self, forward: Forward, cache: torch.Tensor) -> None:
        self._forward, self._cache = forward, cache
        self._tapes: dict[bool, _Tape] = {}

    def __call__(self, inputs: HostPass | PassInputs, lora: LoraPass | None) -> torch.Tensor:
        rows = len(inputs.tokens)
        tape = self._tape(rows, lora)
        # Held, as the tiles are, for as long as the library reads its arrays.
        if isinstance(inputs, HostPass):
            sequences = Sequences.of_host(inputs)
        else:  # of a runner whose tokens may be those that the pass before has just given
            sequences = Sequences.of(inputs.attention, rows)
            slots = inputs.attention.slot_mapping.tolist()
            inputs = HostPass(inputs.tokens.tolist(), inputs.positions.tolist(), slots)
        if tape.program is None:
            return self._compute(inputs, sequences, lora)
        for target, source in zip(tape.inputs, (inputs.tokens, inputs.positions, inputs.slots), strict=True):
            target[:rows] = array("q", source)
        if lora is not None and isinstance(lora.batch, LoraBatch):
            Tiles.of(lora.batch).enter(sequences.record)
        tape.program.run(sequences.record)
        return tape.first(rows)

    @torch.inference_mode()
    def _compute(self, inputs: HostPass, sequences: Sequences, lora: LoraPass | None) -> torch.Tensor:
        """Operation by operation."""
        tokens, positions, slots = map(torch.tensor, (inputs.tokens, inputs.positions, inputs.slots))
        return self._forward(tokens, positions, self._cache, AttentionBatch(slots, plan=sequences), lora)

    def _tape(self, rows: int, lora: LoraPass | None) -> _Tape:
        version = _NONE if lora is None else lora.version
        tape = self._tapes.get(lora is not None)
        if tape is None or tape.version != version or (rows > tape.rows and tape.program is not None):
            tape = self._tapes[lora is not None] = self._record(rows, version, lora)
        return tape

    @torch.inference_mode()
    def _record(self, rows: int, version: int, lora: LoraPass | None) -> _Tape:
        tape = _Tape(max(_LEAST_ROWS, 1 << (rows - 1).bit_length()), version)
        tokens, positions, slots = (torch.frombuffer(each, dtype=torch.int64) for each in tape.inputs)
        adapted = None if lora is None else LoraPass(lora.layers, version)
        try:
            with recording(tape.rows) as taken:
                tape.hidden = self._forward(tokens, positions, self._cache, AttentionBatch(slots), adapted)
        except CaptureError as error:
            logger.warning("the forward pass runs operation by operation: %s", error)
            return tape
        tape.program = taken.program()
        return tape
