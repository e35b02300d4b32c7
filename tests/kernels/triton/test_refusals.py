"""What a kernel does not serve is refused by name, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.blocked import BlockedLogits
from kernels.errors import KernelInputError
from kernels.lora import LoraLayer, lora_batch
from kernels.triton import (
    embed,
    gelu_and_mul,
    lora,
    paged_attention,
    penalties,
    rms_norm,
    rotary,
    sampling,
    silu_and_mul,
    write_kv,
)
from tests.kernels.triton.attention_checks import Case, build

CPU = torch.device("cpu")


def attend(case: Case | None = None, **changes: object) -> None:
    batch = build(case or Case([[(3, 1), (0, 4)]]), torch.float32)
    query, cache = changes.pop("query", batch.query), changes.pop("cache", batch.cache)
    paged_attention.paged_attention(query, cache, batch.attention, 0.1, **changes)


def negative_scale() -> None:
    batch = build(Case([[(3, 1)]]), torch.float32)
    paged_attention.paged_attention(batch.query, batch.cache, batch.attention, -1.0)


def short_table() -> None:
    batch = build(Case([[(3, 1), (20, 4)]]), torch.float32)
    batch.attention.groups[0].blocks = batch.attention.groups[0].blocks.view(2, -1)[:, :1].reshape(-1)
    paged_attention.paged_attention(batch.query, batch.cache, batch.attention, 0.1)


def missing_rows() -> None:
    batch = build(Case([[(3, 1), (20, 4)]]), torch.float32)
    paged_attention.paged_attention(batch.query[:-1], batch.cache, batch.attention, 0.1)


def layer(dtype: torch.dtype = torch.float32, rank: int = 4, parts: int = 1) -> LoraLayer:
    widths = np.full(parts, 8)
    a, b = torch.zeros(2, parts, rank, 16, dtype=dtype), torch.zeros(2, rank, 8 * parts, dtype=dtype)
    return LoraLayer(a, b, np.array([rank, 0]), widths)


def draw(**changes: object) -> None:
    x = BlockedLogits.of(torch.zeros(2, 64))
    arguments = {
        "x": x, "temperature": torch.ones(2), "top_k": [0, 0], "top_p": [1.0, 1.0], "min_p": [0.0, 0.0],
        "uniform": torch.zeros(2, dtype=torch.float64), **changes,
    }  # fmt: skip
    sampling.draw(**arguments)  # type: ignore[arg-type]


ids = torch.tensor([0])
square = torch.zeros(4, 4)
cache = torch.zeros(2, 16, 2, 1, 8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "embed, dtype": (lambda: embed.embed(square.double(), ids), "embed: table is torch.float64, served are float32"),
    "embed, ids": (lambda: embed.embed(square, ids.int()), "embed: ids is torch.int32, served are int64"),
    "embed, stride": (lambda: embed.embed(square.T, ids), "embed: the last axis of table must be contiguous"),
    "write_kv, width": (
        lambda: write_kv.write_kv(torch.zeros(1, 12), cache, ids), "write_kv: kv has rows of 12, the cache takes 16",
    ),
    "write_kv, dtype": (
        lambda: write_kv.write_kv(torch.zeros(1, 16).half(), cache, ids), "write_kv: kv is torch.float16, the cache",
    ),
    "write_kv, slots": (
        lambda: write_kv.write_kv(torch.zeros(2, 16), cache, ids), r"write_kv: slot_mapping has shape \[1\], not \[2\]",
    ),
    "write_kv, cache": (
        lambda: write_kv.write_kv(torch.zeros(1, 16), cache.transpose(0, 1), ids), "write_kv: cache must be contiguous",
    ),
    "write_kv, scales": (
        lambda: write_kv.write_kv(torch.zeros(1, 16), cache, ids, torch.ones(2)), "write_kv: scales belong to a cache",
    ),
    "rms_norm, width": (
        lambda: rms_norm.rms_norm(torch.zeros(1, 20000), torch.ones(20000), 0.1), "rms_norm: rows of 20000; served",
    ),
    "rms_norm, weight": (lambda: rms_norm.rms_norm(square, torch.ones(5), 0.1), r"rms_norm: weight has shape \[5\]"),
    "rms_norm, residual": (
        lambda: rms_norm.rms_norm(square, torch.ones(4), 0.1, square[:2]), "rms_norm: residual has shape",
    ),
    "rotary, odd heads": (
        lambda: rotary.rotary(torch.zeros(1, 1, 5), torch.zeros(1, 1, 5), torch.zeros(1, 1, 5)), "rotary: heads of 5",
    ),
    "rotary, angles": (
        lambda: rotary.rotary(torch.zeros(2, 1, 4), torch.zeros(1, 1, 4), torch.zeros(2, 1, 4)),
        r"rotary: cos has shape \[1, 1, 4\], not \[2, 1, 4\]",
    ),
    "silu_and_mul, halves": (lambda: silu_and_mul.silu_and_mul(torch.zeros(1, 3)), "silu_and_mul: rows of 3 have no"),
    "gelu_and_mul, axes": (lambda: gelu_and_mul.gelu_and_mul(torch.zeros(4)), "gelu_and_mul: x has shape"),
    "attention, head size": (
        lambda: attend(Case([[(3, 1)]], dim=12)), "paged_attention: heads of 12; served are multiples of 8 up to 256",
    ),
    "attention, large heads": (lambda: attend(Case([[(3, 1)]], dim=264)), "paged_attention: heads of 264"),
    "attention, block size": (
        lambda: attend(Case([[(3, 1)]], block_size=8)), "paged_attention: blocks of 8 tokens; served are 16 and 32",
    ),
    "attention, heads": (lambda: attend(Case([[(3, 1)]], heads=5)), "paged_attention: 5 query heads for 2 KV heads"),
    "attention, many heads": (
        lambda: attend(Case([[(3, 1)]], heads=65, kv_heads=1)), "paged_attention: 65 query heads for a KV head",
    ),
    "attention, window": (lambda: attend(window=0), "paged_attention: a window of 0 keys"),
    "attention, soft cap": (lambda: attend(soft_cap=-1.0), "paged_attention: a soft cap of -1.0"),
    "attention, scales": (lambda: attend(scales=torch.ones(2)), "paged_attention: scales belong to a cache of float8"),
    "attention, dtypes": (
        lambda: attend(cache=torch.zeros(2, 16, 2, 2, 64).half()), "paged_attention: query is torch.float32, the cache",
    ),
    "attention, scale": (negative_scale, "paged_attention: a scale of -1.0"),
    "attention, block table": (short_table, "paged_attention: a block table is too short"),
    "attention, rows": (missing_rows, "paged_attention: groups of 5 rows for 4 of the query"),
    "lora, dtypes": (
        lambda: lora.lora_delta(torch.zeros(1, 16).half(), layer(), lora_batch([0], CPU)), "lora_delta: x is",
    ),
    "lora, rank": (
        lambda: lora.lora_delta(torch.zeros(1, 16), layer(rank=300), lora_batch([0], CPU)), "lora_delta: a rank of 300",
    ),
    "lora, parts": (
        lambda: lora.lora_delta(torch.zeros(1, 16), layer(parts=4), lora_batch([0], CPU)), "lora_delta: 4 parts",
    ),
    "lora, slot": (
        lambda: lora.lora_delta(torch.zeros(1, 16), layer(), lora_batch([2], CPU)), "lora_delta: a row's slot",
    ),
    "lora, rows": (
        lambda: lora.lora_delta(torch.zeros(2, 16), layer(), lora_batch([0], CPU)), "lora_delta: x has shape",
    ),
    "penalties, index": (
        lambda: penalties.apply_penalties(square, ids.int(), *[torch.ones(1)] * 4), "apply_penalties: index is",
    ),
    "penalties, entries": (
        lambda: penalties.apply_penalties(square, ids, *[torch.ones(2)] * 4), "apply_penalties: counts has shape",
    ),
    "draw, uniform": (lambda: draw(uniform=torch.zeros(2)), "draw: uniform is torch.float32, served are float64"),
    "draw, filters": (lambda: draw(top_k=[0]), "draw: filters of other than 2 rows"),
    "draw, peaks": (
        lambda: draw(x=replace(BlockedLogits.of(torch.zeros(2, 64)), peaks=torch.zeros(2, 2))), "draw: peaks has shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(KernelInputError, match=message):
        call()


def test_another_device_is_refused() -> None:
    with pytest.raises(KernelInputError, match="embed: table is on meta, this process launches on cpu"):
        embed.embed(torch.zeros(4, 4, device="meta"), ids)
    with pytest.raises(KernelInputError, match="embed: ids is on meta, not on cpu"):
        embed.embed(square, torch.zeros(1, dtype=torch.int64, device="meta"))
