"""From a step's plan to a pass in plain numbers, for kernels that read the host's memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.plan import Span
from kernels.host_pass import HostPass
from kernels.lora import Ints


@dataclass(slots=True)
class HostBatch(HostPass):
    """A pass of the engine; `order` and `sample_rows` are those of `engine.batch.Batch`."""

    order: list[int] = field(default_factory=list)
    sample_rows: Ints | None = None


def host_batch(spans: list[Span], block_size: int) -> HostBatch:
    """A pass over at least one span, all of whose tokens are known. Rows of each adapter are neighbours."""
    adapters = [span.sequence.adapter_slot for span in spans]
    batch = HostBatch(order=sorted(range(len(spans)), key=adapters.__getitem__))
    last_rows = [0] * len(spans)
    for index in batch.order:
        span = spans[index]
        sequence, start, end = span.sequence, span.start, span.start + span.count
        table = sequence.block_table
        batch.tokens += sequence.tokens[start:end]
        batch.positions += range(start, end)
        batch.slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
        batch.counts.append(span.count)
        batch.lengths.append(end)
        batch.starts.append(len(batch.blocks))
        batch.blocks += table[: -(-end // block_size)]
        last_rows[index] = len(batch.tokens) - 1
    sampled = [row for row, span in zip(last_rows, spans, strict=True) if span.sample]
    if len(sampled) != len(batch.tokens) or sampled != list(range(len(sampled))):
        batch.sample_rows = np.array(sampled, dtype=np.int64)
    return batch
