"""Attention over block tables, and the writes before it, against loops in double precision."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engine.batch import CacheLayout, build_batch
from engine.plan import Span
from engine.sequence import Sequence
from kernels.ops import Ops
from shared.sampling import SamplingParams

DIM = 16


class Pool:
    """A cache full of one layer's random keys and values, and sequences with shuffled block tables."""

    def __init__(self, rng: random.Random, block_size: int, kv_heads: int, dtype: torch.dtype, blocks: int) -> None:
        self.rng, self.block_size, self.kv_heads, self.dtype = rng, block_size, kv_heads, dtype
        self.cache = torch.randn(blocks + 1, block_size, 2, kv_heads, DIM).to(dtype)
        self.cache[blocks] = 0
        self.layout = CacheLayout(block_size, blocks, kv_heads, dtype, torch.device("cpu"))
        self.free = list(range(blocks))
        rng.shuffle(self.free)

    def span(self, start: int, count: int) -> Span:
        length = start + count
        table = [self.free.pop() for _ in range(-(-length // self.block_size))]
        tokens = [self.rng.randrange(100) for _ in range(length)]
        sequence = Sequence("r", 0, SamplingParams(), 0, tokens, length, length + 1, block_table=table)
        return Span(sequence, start, count, sample=True)

    def slot(self, span: Span, position: int) -> torch.Tensor:
        block = span.sequence.block_table[position // self.block_size]
        return self.cache[block, position % self.block_size]  # [2, kv_heads, dim]


def naive(pool: Pool, spans: list[Span], query: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention, one row and one head at a time."""
    heads = query.shape[1]
    out = torch.zeros(query.shape[0], heads, DIM, dtype=torch.float64)
    row = 0
    for span in spans:
        for position in range(span.start, span.start + span.count):
            kv = torch.stack([pool.slot(span, p) for p in range(position + 1)]).double()
            for head in range(heads):
                group = head // (heads // pool.kv_heads)
                scores = [float(query[row, head].double() @ key) * scale for key in kv[:, 0, group]]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                mixed = sum((w * v for w, v in zip(weights, kv[:, 1, group], strict=True)), torch.zeros(DIM).double())
                out[row, head] = mixed / sum(weights)
            row += 1
    return out.view(query.shape[0], -1)


#: Starts and counts: decodes, chunks, both sides of block boundaries (blocks of 4), and lengths far apart.
BATCHES = {
    "one decode": [(0, 1)],
    "decode at a block's end": [(3, 1)],
    "decode at a block's start": [(4, 1)],
    "decodes": [(5, 1), (9, 1), (7, 1), (8, 1)],
    "one chunk": [(0, 6)],
    "chunk behind computed tokens": [(7, 5)],
    "chunks of one shape": [(0, 4), (0, 4)],
    "chunks of several shapes": [(0, 7), (4, 3), (2, 9)],
    "mixed": [(11, 1), (3, 1), (0, 5), (8, 4), (6, 1)],
    "lengths far apart": [(150, 1), (2, 1), (140, 1), (3, 1), (1, 1), (0, 40), (0, 2), (1, 1)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_mixed_batch(cpu_ops: Ops, name: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    pool = Pool(random.Random(5), 4, kv_heads, dtype, 120)
    spans = [pool.span(start, count) for start, count in BATCHES[name]]
    tokens = sum(span.count for span in spans)
    fused = torch.randn(tokens, heads + 2, DIM).to(dtype)
    query = fused.narrow(1, 0, heads)
    batch = build_batch(spans, pool.layout)
    spans = [spans[index] for index in batch.order]
    actual = cpu_ops.paged_attention(query, pool.cache, batch.attention, DIM**-0.5)
    expected = naive(pool, spans, query, DIM**-0.5)
    assert actual.shape == (tokens, heads * DIM)
    assert torch.allclose(actual.double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("lengths", [[9] * 12, [5, 31, 17, 8, 30, 29, 3, 12, 1, 22, 16, 15], [40, 2] * 6, [64] * 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 3), (6, 2)])
def test_many_decodes_in_bfloat16(cpu_ops: Ops, lengths: list[int], heads: int, kv_heads: int) -> None:
    torch.manual_seed(8)
    pool = Pool(random.Random(6), 4, kv_heads, torch.bfloat16, 300)
    spans = [*[pool.span(length - 1, 1) for length in lengths], pool.span(2, 3)]
    query = torch.randn(len(lengths) + 3, heads, DIM).bfloat16()
    batch = build_batch(spans, pool.layout)
    spans = [spans[index] for index in batch.order]
    actual = cpu_ops.paged_attention(query, pool.cache, batch.attention, DIM**-0.5)
    assert torch.allclose(actual.double(), naive(pool, spans, query, DIM**-0.5), atol=2e-2)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_over_random_block_sizes(cpu_ops: Ops, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, per_head = rng.choice([1, 2, 3]), rng.choice([1, 3])
    pool = Pool(rng, rng.choice([1, 2, 5, 16]), kv_heads, torch.float32, 600)
    spans = [pool.span(rng.randrange(50), 1) for _ in range(rng.randrange(5))]
    spans += [pool.span(rng.randrange(30), rng.randrange(1, 20)) for _ in range(rng.randrange(1, 4))]
    query = torch.randn(sum(span.count for span in spans), kv_heads * per_head, DIM)
    batch = build_batch(spans, pool.layout)
    spans = [spans[index] for index in batch.order]
    actual = cpu_ops.paged_attention(query, pool.cache, batch.attention, 0.3)
    assert torch.allclose(actual.double(), naive(pool, spans, query, 0.3), atol=1e-5)


def test_lengths_far_apart_are_attended_in_several_groups() -> None:
    pool = Pool(random.Random(1), 4, 1, torch.float32, 1200)
    spans = [pool.span(2000, 1), *[pool.span(3, 1) for _ in range(30)]]
    groups = build_batch(spans, pool.layout).attention.groups
    assert sorted(group.keys for group in groups) == [4, 2001]
    padded = sum(group.batch * group.keys for group in groups)
    assert padded == 2001 + 30 * 4


def test_unwritten_slots_never_matter(cpu_ops: Ops) -> None:
    """What lies behind a sequence's end, in its last block and in padding, is masked."""
    pool = Pool(random.Random(2), 4, 1, torch.float32, 40)
    spans = [pool.span(5, 1), pool.span(17, 1), pool.span(0, 3)]
    query = torch.randn(5, 2, DIM)
    batch = build_batch(spans, pool.layout)
    before = cpu_ops.paged_attention(query, pool.cache, batch.attention, 1.0)
    used = {(span.sequence.block_table[p // 4], p % 4) for span in spans for p in range(span.start + span.count)}
    for block in range(41):
        for offset in range(4):
            if (block, offset) not in used:
                pool.cache[block, offset] = 1e4
    assert torch.equal(cpu_ops.paged_attention(query, pool.cache, batch.attention, 1.0), before)


def test_write_kv_fills_exactly_the_mapped_slots(cpu_ops: Ops) -> None:
    pool = Pool(random.Random(4), 4, 2, torch.float32, 20)
    spans = [pool.span(3, 1), pool.span(0, 6), pool.span(7, 3)]
    batch = build_batch(spans, pool.layout)
    expected = pool.cache.clone()
    fused = torch.randn(10, 3 * 2 * DIM)
    kv = fused.narrow(1, 2 * DIM, 4 * DIM)
    row = 0
    for span in (spans[index] for index in batch.order):
        for position in range(span.start, span.start + span.count):
            expected[span.sequence.block_table[position // 4], position % 4] = kv[row].view(2, 2, DIM)
            row += 1
    cpu_ops.write_kv(kv, pool.cache, batch.attention.slot_mapping)
    assert torch.equal(pool.cache, expected)


def test_copy_blocks_reads_all_sources_first(cpu_ops: Ops) -> None:
    cache = torch.randn(3, 6, 2, 2, 1, 4)
    before = cache.clone()
    cpu_ops.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 5]))
    assert torch.equal(cache[:, 1], before[:, 0])
    assert torch.equal(cache[:, 5], before[:, 1])
    assert torch.equal(cache[:, [0, 2, 3, 4]], before[:, [0, 2, 3, 4]])
