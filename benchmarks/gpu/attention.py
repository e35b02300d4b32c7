"""Paged attention: decodes, limited by memory, and prefill chunks, limited by products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.measure import Case, Place, close
from kernels.attention import AttentionBatch, AttentionGroup
from kernels.ops import Ops

BLOCK_SIZE = 16
#: Of the rows, so many are compared with float64.
CHECKED = 24
#: Weights are rounded to bfloat16 before they meet the values: errors of 2^-9 that are independent of each other.
RELATIVE, ABSOLUTE = 2.0**-7, 2.0**-6


@dataclass(frozen=True)
class Shape:
    """So many sequences of `before` computed tokens and `count` new ones."""

    sequences: int
    before: int
    count: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None
    soft_cap: float | None = None
    float8: bool = False

    @property
    def name(self) -> str:
        kind = "decode" if self.count == 1 else "prefill"
        more = "".join(
            f", {text}"
            for text in (
                f"{self.heads}/{self.kv_heads} heads of {self.dim}",
                self.window and f"window {self.window}",
                self.soft_cap and "soft cap",
                self.float8 and "float8",
            )
            if text
        )
        behind = f" behind {self.before}" if self.count > 1 and self.before else ""
        tokens = self.before + 1 if self.count == 1 else self.count
        return f"{kind} {self.sequences} x {tokens}{behind}{more}"


FULL = [
    Shape(1, 1023, 1),
    Shape(1, 32767, 1),
    Shape(16, 2047, 1),
    Shape(64, 4095, 1),
    Shape(256, 1023, 1),
    Shape(64, 4095, 1, kv_heads=8, dim=64),
    Shape(64, 2047, 1, heads=16, kv_heads=4, dim=256),
    Shape(64, 4095, 1, window=1024),
    Shape(64, 4095, 1, soft_cap=30.0),
    Shape(64, 4095, 1, float8=True),
    Shape(1, 0, 4096),
    Shape(4, 0, 2048),
    Shape(8, 3584, 512),
    Shape(4, 0, 2048, dim=64),
    Shape(4, 0, 2048, heads=16, kv_heads=4, dim=256),
    Shape(1, 0, 8192, window=1024),
    Shape(4, 0, 2048, float8=True),
]
TINY = [
    Shape(2, 290, 1, heads=4, kv_heads=2, dim=16),
    Shape(2, 10, 20, heads=4, kv_heads=2, dim=16),
    Shape(2, 30, 1, heads=2, kv_heads=1, dim=16, window=8, soft_cap=5.0),
    Shape(1, 20, 1, heads=2, kv_heads=1, dim=16, float8=True),
]


def cases(place: Place, ops: Ops) -> Iterator[Callable[[], Case]]:
    """All of the section."""
    for shape in TINY if place.tiny else FULL:
        yield partial(_attend, place, ops, shape)


def _attend(place: Place, ops: Ops, shape: Shape) -> Case:
    length = shape.before + shape.count
    blocks_each = -(-length // BLOCK_SIZE)
    blocks = shape.sequences * blocks_each + 1
    cache = place.randn(blocks, BLOCK_SIZE, 2, shape.kv_heads, shape.dim)
    scales = torch.tensor([0.5, 2.0], device=place.device) if shape.float8 else None
    if shape.float8:
        cache = cache.float().to(torch.float8_e4m3fn)
    tables = torch.randperm(blocks, device=place.device)[: blocks - 1].view(shape.sequences, -1)
    tokens = shape.sequences * shape.count
    query = place.randn(tokens, shape.heads, shape.dim)
    group = AttentionGroup(
        batch=shape.sequences,
        queries=shape.count,
        rows=tokens,
        blocks=tables.reshape(-1),
        keys=length,
        counts=np.full(shape.sequences, shape.count),
        lengths=np.full(shape.sequences, length),
    )
    batch = AttentionBatch(torch.zeros(tokens, dtype=torch.int64, device=place.device), [group])
    scale = shape.dim**-0.5

    def run() -> torch.Tensor:
        return ops.paged_attention(  # type: ignore[no-any-return]
            query, cache, batch, scale, window=shape.window, soft_cap=shape.soft_cap, scales=scales
        )

    def check() -> None:
        out = run()
        for row in np.random.default_rng(0).choice(tokens, min(CHECKED, tokens), replace=False).tolist():
            sequence, offset = divmod(row, shape.count)
            end = shape.before + offset + 1
            begin = 0 if shape.window is None else max(0, end - shape.window)
            kv = cache[tables[sequence]].flatten(0, 1)[begin:end].double()
            if scales is not None:
                kv = kv * scales.double().view(2, 1, 1)
            keys, values = kv.permute(1, 2, 0, 3)
            score = query[row].double().view(shape.kv_heads, -1, shape.dim) @ keys.transpose(1, 2) * scale
            if shape.soft_cap is not None:
                score = shape.soft_cap * torch.tanh(score / shape.soft_cap)
            close(out[row], (score.softmax(-1) @ values).reshape(-1), RELATIVE, ABSOLUTE)

    ends = np.arange(shape.before, length) + 1
    seen = ends if shape.window is None else np.minimum(ends, shape.window)
    read = min(length, shape.window + shape.count) if shape.window is not None else length
    row_bytes = 2 * shape.kv_heads * shape.dim * cache.element_size()
    moved = shape.sequences * read * row_bytes + 4 * tokens * shape.heads * shape.dim
    flops = 4.0 * shape.sequences * shape.heads * shape.dim * int(seen.sum())
    return Case(shape.name, run, check, bytes=moved, flops=flops)
