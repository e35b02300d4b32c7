"""Weights in three quarters of their bytes: the same bits come out, whatever the weights are."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import native
from kernels.cpu.native import library, operations
from kernels.ops import Ops, ops_for
from tests.support.native import load_native

#: Of a model's layers, and the least that is compacted.
SIZES = [(32, 64), (70, 64), (96, 100), (960, 576), (130, 1536)]


@pytest.fixture
def ops() -> Ops:
    load_native()
    if native.paths() != "avx512_bf16":
        pytest.skip("weights are compacted where the CPU multiplies bfloat16")
    torch.manual_seed(11)
    return ops_for("cpu", native=True)


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    real = operations._sizes
    monkeypatch.setattr(operations, "_sizes", lambda *sizes, gated: (real(*sizes, gated=gated)[0], 0))


def outputs(ops: Ops, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    head = ops.unembed(weight)
    ids = torch.arange(len(weight))
    results = [
        ops.linear(weight, bias)(x),
        ops.gated_linear(weight, bias)(x),
        head(x).values,
        ops.embed(ops.pack(weight), ids),
    ]
    screen = ops.screen(head) if weight.isfinite().all() else None
    if screen is not None:
        results.append(torch.tensor(screen(x)))
    return tuple(results)


def same(ops: Ops, weight: torch.Tensor, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with the compacted weight have the bits of those with the plain one."""
    bias, x = torch.randn(len(weight)).bfloat16(), torch.randn(rows, weight.shape[1]).bfloat16()
    found = outputs(ops, weight, bias, x)
    with monkeypatch.context() as patch:
        plain(patch)
        expected = outputs(ops, weight, bias, x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def is_compact(ops: Ops, weight: torch.Tensor) -> bool:
    rows, columns = weight.shape
    return len(ops.pack(weight).data) != library.library().ropeway_packed_bytes(rows, columns, 1, False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 11, 12, 13, 32, 121])
def test_the_same_bits_come_out(ops: Ops, size: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(size).bfloat16()
    assert is_compact(ops, weight)
    same(ops, weight, rows, monkeypatch)


def test_it_takes_less_than_four_fifths(ops: Ops) -> None:
    for size in ((960, 576), (3072, 576), (576, 1536)):
        weight = torch.randn(size).bfloat16()
        assert len(ops.pack(weight).data) < 0.79 * weight.numel() * 2


@pytest.mark.parametrize("places", [[0], [3], [4, 5], [8, 12, 16], [572], [575], [0, 288, 575]])
def test_rare_weights_lie_whole(ops: Ops, places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = (torch.rand(96, 576) + 0.5).bfloat16()
    for place in places:
        weight[:, place] = 10.0 ** torch.linspace(-30, 30, 96)
    assert is_compact(ops, weight)
    same(ops, weight, 3, monkeypatch)


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("nan"), 1e-40])
def test_zeros_and_what_is_no_number(ops: Ops, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single one, then so many that it is among the common ones."""
    weight = (torch.rand(64, 128) + 0.5).bfloat16()
    weight[17, 99] = value
    assert is_compact(ops, weight)
    same(ops, weight, 2, monkeypatch)
    weight[torch.rand(64, 128) < 0.5] = value
    assert is_compact(ops, weight)
    same(ops, weight, 2, monkeypatch)


def test_weights_of_all_sizes_stay_plain(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any bits at all, as of a weight that holds something else: nothing is common, and nothing is lost."""
    bits = torch.randint(-(2**15), 2**15, (64, 128)).to(torch.int16)
    weight = bits.view(torch.bfloat16)
    weight[~weight.isfinite()] = 1.0
    assert not is_compact(ops, weight)
    same(ops, weight, 2, monkeypatch)


@pytest.mark.parametrize("size", [(64, 2), (64, 6), (33, 9), (1, 4), (64, 126)])
def test_sizes_that_are_not_compacted(ops: Ops, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(size).repeat(2, 1).bfloat16()
    assert not is_compact(ops, weight)
    same(ops, weight, 3, monkeypatch)


def test_float32_is_not(ops: Ops) -> None:
    weight = torch.randn(64, 128)
    assert len(ops.pack(weight).data) == weight.numel() * 4


@pytest.mark.parametrize(
    ("place", "value"), [(16, 1), (20, -1), (20, 2**31 - 1), (20, 2), (-1, 5), (-1, 2**31 - 1), (-1, -1)]
)
def test_what_was_kept_and_is_harmed_is_told_apart(ops: Ops, place: int, value: int) -> None:
    """Numbers of blocks in the pool, in a panel's header and behind the panels, where the pool's own begin."""
    weight = (torch.rand(64, 128) + 0.5).bfloat16()
    weight[:32, 40] = 10.0 ** torch.linspace(-30, 30, 32)
    packed = ops.pack(weight)
    numbers = packed.data.view(torch.int32)
    panel = (64 + 128 // 4 * 192) // 4
    assert numbers[16 // 4 : 24 // 4].tolist() == [0, 1] and numbers[2 * panel].item() == 10
    numbers[2 * panel if place < 0 else place // 4] = value if value != 5 or place >= 0 else 128 // 4
    with pytest.raises(ValueError, match="is not what was packed"):
        ops.linear(packed)
    numbers.zero_()
    ops.linear(packed)(torch.randn(2, 128).bfloat16())
