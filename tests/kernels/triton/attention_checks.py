"""Checks of paged attention: batches with poison in every slot that nobody may read, against softmax in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from kernels.attention import AttentionBatch, AttentionGroup
from tests.kernels.triton.support import ULP, assert_close

NAN = float("nan")
#: Float8 has three bits behind the point; its numbers are exact in what the expected result is computed from.
FLOAT8_SCALES = torch.tensor([0.5, 2.0])


@dataclass(frozen=True)
class Case:
    """Spans are (tokens before, query tokens); -1 tokens before is a padded sequence without any key."""

    groups: Sequence[Sequence[tuple[int, int]]]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    float8: bool = False


DECODES = [(0, 1), (14, 1), (15, 1), (16, 1), (254, 1), (255, 1), (256, 1), (600, 1)]
CHUNKS = [(0, 16), (0, 33), (16, 16), (31, 2), (5, 40), (47, 17), (300, 3), (30, 5)]

CASES: dict[str, Case] = {
    "one token": Case([[(0, 1)]]),
    "decodes at boundaries": Case([DECODES]),
    "decodes within one cut": Case([DECODES[:5]], heads=3, kv_heads=1),
    "decodes, blocks of 32, heads of 128": Case([DECODES], heads=8, kv_heads=1, dim=128, block_size=32),
    "decodes, heads of 80": Case([DECODES[:6]], heads=4, kv_heads=4, dim=80),
    "decodes, heads of 256": Case([DECODES[2:7]], heads=2, kv_heads=1, dim=256),
    "decodes, many heads of one": Case([DECODES[4:7]], heads=20, kv_heads=1),
    "decodes, window": Case([DECODES], window=7),
    "decodes, window over cuts": Case([DECODES], window=300, block_size=32),
    "decodes, soft cap": Case([DECODES[2:7]], soft_cap=3.0),
    "padded decodes": Case([[(3, 1), (-1, 1), (20, 1), (-1, 1)]]),
    "padded decodes beside cuts": Case([[(400, 1), (-1, 1)]]),
    "one chunk": Case([[(0, 5)]], heads=4, kv_heads=1),
    "chunks behind prefixes": Case([CHUNKS]),
    "chunks, blocks of 32, heads of 128": Case([CHUNKS[:5]], heads=4, kv_heads=2, dim=128, block_size=32),
    "chunks, heads of 80": Case([CHUNKS[1:4]], heads=5, kv_heads=1, dim=80),
    "chunks, heads of 256": Case([CHUNKS[1:3]], heads=2, kv_heads=1, dim=256),
    "chunks, window": Case([CHUNKS], window=9),
    "chunks, soft cap": Case([CHUNKS[:4]], soft_cap=3.0),
    "mixed": Case([[(11, 1), (3, 1), (0, 5), (8, 4), (6, 1), (300, 1), (40, 20)]]),
    "mixed, window and soft cap": Case([[(311, 1), (3, 1), (0, 25), (48, 24)]], window=20, soft_cap=4.0),
    "groups": Case([[(5, 1), (9, 1)], [(0, 7), (4, 3)], [(280, 1)]]),
    "float8, soft cap": Case([[(20, 1), (3, 30)]], float8=True, soft_cap=3.0),
    "float8": Case([[(11, 1), (300, 1), (0, 25), (48, 24)]], float8=True, heads=4, dim=128),
}


@dataclass
class Batch:
    """A case made flesh: tensors, and per span its keys and values as they count, [keys, 2, kv_heads, dim] float64."""

    query: torch.Tensor
    cache: torch.Tensor
    attention: AttentionBatch
    spans: list[tuple[int, int]]
    kv: list[torch.Tensor]
    scales: torch.Tensor | None


def build(case: Case, dtype: torch.dtype, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    spans = [span for group in case.groups for span in group]
    size = case.block_size
    need = [-(-max(1, start + count) // size) for start, count in spans]
    blocks = rng.permutation(sum(need) + 1)
    poison = int(blocks[-1])
    cache = torch.full((len(blocks), size, 2, case.kv_heads, case.dim), NAN)
    kv, groups, used = [], [], 0
    for group in case.groups:
        width = max(-(-max(1, start + count) // size) for start, count in group) + 1
        tables = np.full((len(group), width), poison, dtype=np.int64)
        for row, (start, count) in enumerate(group):
            length = 0 if start < 0 else start + count
            table = blocks[used : used + -(-max(1, length) // size)]
            used += len(table)
            tables[row, : len(table)] = table
            values = torch.randn(length, 2, case.kv_heads, case.dim)
            if case.float8:
                values = values.to(torch.float8_e4m3fn).float()
            # What the first query of the span does not see any more may be gone already.
            seen = 0 if case.window is None else max(0, start + 1 - case.window)
            for position in range(seen, length):
                cache[table[position // size], position % size] = values[position]
            kv.append(values)
        counts = np.array([count for _, count in group])
        lengths = np.array([0 if start < 0 else start + count for start, count in group])
        groups.append(
            AttentionGroup(
                batch=len(group),
                queries=int(counts.max()),
                rows=int(counts.sum()),
                blocks=torch.from_numpy(tables.reshape(-1)),
                keys=int(lengths.max()),
                counts=counts,
                lengths=lengths,
            )
        )
    tokens = sum(count for _, count in spans)
    fused = torch.full((tokens, case.heads + 2 * case.kv_heads, case.dim), NAN).to(dtype)
    fused[:, : case.heads] = torch.randn(tokens, case.heads, case.dim).to(dtype)
    stored = cache.to(torch.float8_e4m3fn) if case.float8 else cache.to(dtype)
    scales = FLOAT8_SCALES if case.float8 else None
    factor = torch.ones(2) if scales is None else scales
    as_stored = [values if case.float8 else values.to(dtype) for values in kv]
    counted = [values.double() * factor.double().view(2, 1, 1) for values in as_stored]
    attention = AttentionBatch(torch.zeros(tokens, dtype=torch.int64), groups)
    return Batch(fused[:, : case.heads], stored, attention, spans, counted, scales)


def expected(case: Case, batch: Batch, scale: float) -> torch.Tensor:
    """[tokens, heads * dim] float64."""
    rows: list[torch.Tensor] = []
    first = 0
    for (start, count), kv in zip(batch.spans, batch.kv, strict=True):
        for offset in range(count):
            query = batch.query[first + offset].double().view(case.kv_heads, -1, case.dim)
            end = 0 if start < 0 else start + offset + 1
            begin = 0 if case.window is None else max(0, end - case.window)
            keys, values = kv[begin:end].permute(1, 2, 0, 3)  # [kv_heads, keys, dim]
            score = query @ keys.transpose(1, 2) * scale
            if case.soft_cap is not None:
                score = case.soft_cap * torch.tanh(score / case.soft_cap)
            rows.append(
                (score.softmax(-1) @ values).reshape(-1) if end else torch.zeros(case.heads * case.dim).double()
            )
        first += count
    return torch.stack(rows)


def check_case(module: ModuleType, case: Case, dtype: torch.dtype) -> torch.Tensor:
    """The result; it is within rounding of the weights, which are at most 1, and of the result."""
    batch = build(case, dtype)
    scale = case.dim**-0.5 * (4 if case.soft_cap else 1)
    out = module.paged_attention(
        batch.query,
        batch.cache,
        batch.attention,
        scale,
        window=case.window,
        soft_cap=case.soft_cap,
        scales=batch.scales,
    )
    assert_close(out, expected(case, batch, scale), ULP[dtype], 5e-6)
    return out


def random_case(seed: int) -> Case:
    """Any mixture of decodes and chunks, heads, blocks and options."""
    rng = np.random.default_rng(seed)
    spans = [(int(rng.choice([0, 15, 16, 31, 255, rng.integers(500)])), 1) for _ in range(rng.integers(4))]
    spans += [(int(rng.integers(80)), int(rng.integers(1, 50))) for _ in range(rng.integers(1, 4))]
    kv_heads = int(rng.integers(1, 4))
    return Case(
        [[spans[index] for index in rng.permutation(len(spans))]],
        heads=kv_heads * int(rng.integers(1, 6)),
        kv_heads=kv_heads,
        dim=int(rng.choice([8, 16, 64, 72, 96, 128])),
        block_size=int(rng.choice([16, 32])),
        window=int(rng.integers(1, 400)) if rng.random() < 0.4 else None,
        soft_cap=5.0 if rng.random() < 0.3 else None,
    )
