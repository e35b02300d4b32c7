"""One check for each operation: random shapes, empty and single rows, poison around everything, against float64.

A check takes the operation, so that it can be run on one with a mistake in it and has to fail then.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch

from kernels.lora import LoraLayer, lora_batch
from kernels.reference import lora as lora_reference
from kernels.reference import sampling as sampling_reference
from kernels.reference import write_kv as write_kv_reference
from tests.kernels.triton.support import ULP, assert_close, strided

NAN = float("nan")
CPU = torch.device("cpu")


def sizes(count: int, *bounds: tuple[int, int]) -> list[tuple[int, ...]]:
    """Random sizes, each within its bounds."""
    return [tuple(int(torch.randint(low, high + 1, ())) for low, high in bounds) for _ in range(count)]


def check_embed(module: ModuleType, dtype: torch.dtype) -> None:
    for tokens, entries, width in (
        *sizes(3, (1, 9), (1, 50), (1, 3000)),
        (0, 5, 8),
        (1, 3, 1),
        (7, 40, 1500),
        (5, 9, 64),
    ):
        table = strided(entries, width, dtype)
        ids = torch.randint(entries, (tokens,))
        out = module.embed(table, ids)
        assert torch.equal(out, table[ids])
    out = module.embed(table, torch.tensor([0, -1, entries, entries - 1]))
    assert torch.equal(out[[0, 3]], table[[0, entries - 1]])
    assert bool(out[1:3].isnan().all()), "ids that are not in the table were read"


def check_write_kv(module: ModuleType, dtype: torch.dtype) -> None:
    fixed = (
        (0, 3, 16, 1, 64),
        (1, 2, 16, 3, 64),
        (9, 4, 32, 2, 80),
        (5, 3, 16, 8, 256),
    )
    for tokens, blocks, size, kv_heads, dim in (*sizes(3, (1, 16), (1, 5), (16, 16), (1, 9), (1, 300)), *fixed):
        kv = strided(tokens, 2 * kv_heads * dim, dtype)
        cache = torch.full((blocks, size, 2, kv_heads, dim), NAN, dtype=dtype)
        slots = torch.randperm(blocks * size)[:tokens]
        expected = cache.clone()
        expected.view(blocks * size, -1)[slots] = kv
        module.write_kv(kv, cache, slots)
        assert torch.equal(cache.nan_to_num(7.0), expected.nan_to_num(7.0))
    before = cache.clone()
    module.write_kv(kv, cache, torch.tensor([-1, -5, blocks * size, blocks * size + 3, 2**40]))
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0)), "slots that do not exist were written"


def check_write_kv_float8(module: ModuleType, dtype: torch.dtype) -> None:
    blocks, size, kv_heads, dim = 3, 16, 2, 64
    kv = (torch.randn(6, 2 * kv_heads * dim) * 10 ** (torch.rand(6, 2 * kv_heads * dim) * 5 - 3)).to(dtype)
    kv[0, 0], kv[1, 200] = 3000.0, -3000.0  # out of range
    scales = torch.tensor([0.5, 2.0])
    cache = torch.zeros((blocks, size, 2, kv_heads, dim), dtype=torch.float8_e4m3fn)
    slots = torch.randperm(blocks * size)[:6]
    module.write_kv(kv, cache, slots, scales)
    expected = cache.clone()
    write_kv_reference.write_kv(kv, expected, slots, scales)
    module.write_kv(kv, cache, slots, scales)
    assert torch.equal(cache.float(), expected.float())
    wanted = (kv.double().view(6, 2, -1) / scales.double().view(2, 1)).clamp(-448, 448).view(6, -1)
    # Three bits behind the point: half of the last is a sixteenth; below 2^-6 steps are of 2^-9.
    assert_close(cache.float().view(blocks * size, -1)[slots], wanted, 2.0**-4, 2.0**-10)


def check_rms_norm(module: ModuleType, dtype: torch.dtype) -> None:
    fixed = (
        (0, 8, True),
        (1, 1, False),
        (3, 576, True),
        (2, 1000, False),
        (2, 4096, True),
    )
    for tokens, width, with_residual in (*sizes(4, (1, 5), (1, 3000), (0, 1)), *fixed):
        x = strided(tokens, width, dtype)
        residual = strided(tokens, width, dtype) if with_residual else None
        weight = (1 + torch.randn(width) / 4).to(dtype)
        y = x.double()
        if residual is not None:
            total = (residual.float() + x.float()).to(dtype)
            y = total.double()
        expected = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
        out = module.rms_norm(x, weight, 1e-3, residual)
        assert_close(out, expected, 2 * ULP[dtype] + 2.0**-20, 1e-6)
        if residual is not None:
            assert_close(residual, total.double(), ULP[dtype], 0.0)


def check_rotary(module: ModuleType, dtype: torch.dtype) -> None:
    for tokens, heads, half in (
        *sizes(3, (1, 5), (1, 20), (1, 128)),
        (0, 2, 32),
        (1, 1, 32),
        (3, 9, 64),
        (2, 12, 40),
        (2, 3, 128),
    ):
        dim = 2 * half
        fused = strided(tokens, (heads + 2) * dim, dtype)
        x = fused.view(tokens, heads + 2, dim).narrow(1, 0, heads)
        angle = torch.rand(tokens, 1, dim // 2) * 100
        cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
        sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
        rest = fused[:, heads * dim :].clone()
        a, b = x.double().chunk(2, -1)
        expected = x.double() * cos.double() + torch.cat((b, a), -1) * sin.double()
        module.rotary(x, cos, sin)
        assert_close(x, expected, ULP[dtype], 2.0**-20)
        assert torch.equal(fused[:, heads * dim :], rest)


def _check_gated(
    op: Callable[[torch.Tensor], torch.Tensor], gate: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    for tokens, width in (*sizes(3, (1, 5), (1, 3000)), (0, 4), (1, 1), (3, 1536), (2, 1025)):
        x = strided(tokens, 2 * width, dtype)
        x[:, :width] *= 4
        wide = x.double()
        out = op(x)
        assert_close(out, gate(wide[:, :width]) * wide[:, width:], ULP[dtype] + 2.0**-20, 1e-6)


def check_silu_and_mul(module: ModuleType, dtype: torch.dtype) -> None:
    _check_gated(module.silu_and_mul, torch.nn.functional.silu, dtype)
    far = torch.tensor([[-1e4, -100.0, 1e4, 1.0, 2.0, 3.0]]).to(dtype)
    assert_close(
        module.silu_and_mul(far), torch.tensor([[0.0, 0.0, float(far[0, 2]) * 3]], dtype=torch.float64), 1e-2, 1e-6
    )


def check_gelu_and_mul(module: ModuleType, dtype: torch.dtype) -> None:
    def tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    _check_gated(module.gelu_and_mul, tanh, dtype)
    _check_gated(lambda x: module.gelu_and_mul(x, False), torch.nn.functional.gelu, dtype)


def lora_layer(
    rng: np.random.Generator, slots: int, widths: list[int], inputs: int, max_rank: int, dtype: torch.dtype
) -> LoraLayer:
    ranks = rng.integers(0, max_rank + 1, slots)
    ranks[0] = max_rank
    a = torch.zeros(slots, len(widths), max_rank, inputs)
    b = torch.zeros(slots, max_rank, sum(widths))
    for slot, rank in enumerate(ranks.tolist()):
        a[slot, :, :rank] = torch.randn(len(widths), rank, inputs) * inputs**-0.5
        b[slot, :rank] = torch.randn(rank, sum(widths))
    return LoraLayer(a.to(dtype), b.to(dtype), ranks, np.array(widths))


def check_lora(module: ModuleType, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    for tokens, widths, inputs, max_rank in (
        (1, [8], 40, 4),
        (40, [130, 60, 60], 600, 16),
        (19, [200, 200], 1030, 33),
        (3, [576], 576, 8),
    ):
        layer = lora_layer(rng, 4, widths, inputs, max_rank, dtype)
        slots = rng.integers(-1, 4, tokens)
        slots[0] = 0
        batch = lora_batch(slots, CPU)
        x = strided(tokens, inputs, dtype)
        delta = module.lora_delta(x, layer, batch)
        expected = torch.zeros(tokens, sum(widths), dtype=torch.float64)
        for row, slot in enumerate(slots.tolist()):
            first = 0
            for part, width in enumerate(widths if slot >= 0 else []):
                low = x[row].double() @ layer.a[slot, part].double().T
                expected[row, first : first + width] = low @ layer.b[slot, :, first : first + width].double()
                first += width
        # Terms are of size 1 and as many as the rank; on a GPU the inner result is rounded as well.
        assert_close(delta, expected, 2e-5, 1e-4)
        assert not bool(delta[torch.from_numpy(slots < 0)].any()), (
            "rows of the base model must stay exactly as they are"
        )
        assert torch.equal(delta, module.lora_delta(x, layer, lora_batch(slots, CPU)))
        alone = module.lora_delta(x[:1], layer, lora_batch(slots[:1], CPU))
        assert torch.equal(delta[:1], alone), "a row's result depends on the batch"


def check_embed_delta(module: ModuleType, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(6)
    plain = lora_layer(rng, 3, [72], 50, 8, dtype)
    layer = LoraLayer(plain.a.transpose(2, 3).contiguous(), plain.b, plain.ranks, plain.widths)
    slots = np.array([2, -1, 0, 0, 1, 2, -1])
    ids = torch.randint(50, (7,))
    delta = module.embed_delta(ids, layer, lora_batch(slots, CPU))
    expected = lora_reference.embed_delta(ids, layer, lora_batch(slots, CPU)).double()
    assert_close(delta, expected, 2e-5, 1e-4)


def check_penalties(module: ModuleType) -> None:
    for entries in (0, 1, 255, 700):
        logits = torch.randn(3, 500)
        index = torch.randperm(1500)[:entries]
        counts = torch.randint(0, 4, (entries,)).float()
        presence, frequency = torch.randn(entries), torch.randn(entries)
        repetition = torch.rand(entries) + 0.5
        expected = logits.clone()
        sampling_reference.apply_penalties(expected, index, counts, presence, frequency, repetition)
        module.apply_penalties(logits, index, counts, presence, frequency, repetition)
        assert_close(logits, expected.double(), 2.0**-22, 1e-6)
    before = logits.clone()
    three = torch.ones(3)
    module.apply_penalties(logits, torch.tensor([-1, 1500, 2**40]), three, three, three, three)
    assert torch.equal(logits, before)


def check_uniforms(module: ModuleType) -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 12345678901234567]
    seeds += np.random.default_rng(1).integers(-(2**62), 2**62, 200).tolist()
    choices = [index % 7 for index in range(len(seeds))]
    positions = [(index * 7919) % 100_000 for index in range(len(seeds))]
    found = module.uniforms(seeds, choices, positions, CPU)
    assert torch.equal(found, torch.from_numpy(sampling_reference.uniforms(seeds, choices, positions)))
    assert module.uniforms([], [], [], CPU).shape == (0,)
