"""Native attention, and steps that are recorded once and then run in one call."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention import AttentionBatch
from kernels.cpu.native import library as native
from kernels.cpu.native.library import DTYPES, Batch
from kernels.cpu.native.program import CaptureError, Program, empty, issue, recorder, recording
from kernels.ops import register
from kernels.reference.capture import Forward, Step

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

#: Rows that a program has at least.
_LEAST_ROWS = 64


@dataclass(slots=True)
class Sequences:
    """A batch as the library takes it; the arrays are what `record` points to."""

    counts: Ints
    lengths: Ints
    starts: Ints
    blocks: Ints
    record: Batch

    @classmethod
    def of(cls, batch: AttentionBatch, rows: int) -> Sequences:
        """All groups of a batch, whatever their padding."""
        counts = np.concatenate([group.counts for group in batch.groups])
        lengths = np.concatenate([group.lengths for group in batch.groups])
        blocks = np.concatenate([group.blocks.numpy() for group in batch.groups])
        starts: list[Ints] = []
        first = 0
        for group in batch.groups:
            size = len(group.blocks)
            starts.append(np.arange(first, first + size, size // group.batch))
            first += size
        begins = np.concatenate(starts)
        record = Batch(
            rows,
            len(counts),
            counts.ctypes.data,
            lengths.ctypes.data,
            begins.ctypes.data,
            blocks.ctypes.data,
        )
        return cls(counts, lengths, begins, blocks, record)


@register("paged_attention", "cpu.native")
def paged_attention(query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Contract of the reference. A row's result depends, bit for bit, on its own query, keys and values alone."""
    rows, heads, dim = query.shape
    _, block_size, _, kv_heads, _ = cache.shape
    out = empty(rows, heads * dim, query.dtype)
    record = native.Attention(
        query.data_ptr(),
        cache.data_ptr(),
        out.data_ptr(),
        query.stride(0),
        out.stride(0),
        block_size,
        heads,
        kv_heads,
        dim,
        DTYPES[query.dtype],
        scale,
    )
    described = None
    if recorder() is None:
        plan = batch.plan
        if not isinstance(plan, Sequences):
            plan = batch.plan = Sequences.of(batch, rows)
        described = plan.record
    issue(record, rows, query, cache, out, batch=described)
    return out


@register("capture", "cpu.native")
def capture(forward: Forward, cache: torch.Tensor) -> Step:
    """Contract of the reference: the pass is recorded for as many rows as the largest batch so far has had."""
    return _Captured(forward, cache)


class _Captured:
    """A forward pass as one program."""

    def __init__(self, forward: Forward, cache: torch.Tensor) -> None:
        self._forward, self._cache = forward, cache
        self._rows = 0
        self._program: Program | None = None
        self._failed = False

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        rows = len(tokens)
        if rows > self._rows and not self._failed:
            self._record(rows)
        if self._program is None:
            return self._forward(tokens, positions, self._cache, batch)
        for target, source in zip(self._inputs, (tokens, positions, batch.slot_mapping), strict=True):
            target[:rows] = source
        sequences = Sequences.of(batch, rows)  # held for as long as the library reads its arrays
        self._program.run(sequences.record)
        return self._hidden[:rows]

    def _record(self, rows: int) -> None:
        rows = max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
        self._inputs = [torch.zeros(rows, dtype=torch.int64) for _ in range(3)]
        tokens, positions, slots = self._inputs
        try:
            with recording(rows) as taken:
                self._hidden = self._forward(tokens, positions, self._cache, AttentionBatch(slots))
        except CaptureError as error:
            logger.warning("the forward pass runs operation by operation: %s", error)
            self._failed, self._program = True, None
            return
        self._rows, self._program = rows, taken.program()
