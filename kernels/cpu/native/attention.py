"""Native attention."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention import AttentionBatch
from kernels.cpu.native import library as native
from kernels.cpu.native.library import DTYPES, Batch
from kernels.cpu.native.program import empty, issue, recorder
from kernels.host_pass import HostPass
from kernels.ops import register

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sequences:
    """A batch as the library takes it; `numbers` are what `record` points to."""

    numbers: object
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
        numbers = counts, lengths, np.concatenate(starts), blocks
        return cls(numbers, Batch(rows, len(counts), *(each.ctypes.data for each in numbers)))

    @classmethod
    def of_host(cls, inputs: HostPass) -> Sequences:
        """Those of a pass in plain numbers."""
        # An array of Python's: NumPy's and torch's code would have to come back into the CPU's caches at every pass.
        numbers = array("q", inputs.counts + inputs.lengths + inputs.starts + inputs.blocks)
        address, sequences = numbers.buffer_info()[0], len(inputs.counts)
        counts, lengths, starts, blocks = (address + part * sequences * numbers.itemsize for part in range(4))
        return cls(numbers, Batch(len(inputs.tokens), sequences, counts, lengths, starts, blocks))


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
