"""LoRA of any mix of adapters: each row gets its own adapter's update, and the base model's rows none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.cpu.lora import add_lora as cpu_add_lora
from kernels.lora import LoraBatch, LoraLayer, lora_batch
from kernels.reference.lora import add_lora as reference_add_lora

ALL = pytest.mark.parametrize("add_lora", [reference_add_lora, cpu_add_lora], ids=["reference", "cpu"])
AddLora = Callable[[torch.Tensor, torch.Tensor, LoraLayer, LoraBatch], None]
#: A sum of `rank` products of sums of `inputs` products, each rounded to the type.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def random_layer(slots: int, widths: tuple[int, ...], rank: int, inputs: int, dtype: torch.dtype) -> LoraLayer:
    a = torch.randn(slots, len(widths), rank, inputs) / inputs**0.5
    b = torch.randn(slots, rank, sum(widths)) / rank**0.5
    return LoraLayer(a.to(dtype), b.to(dtype), widths)


def batch_of(slots: list[int], ranks: list[int]) -> LoraBatch:
    batch = lora_batch(slots, ranks, torch.device("cpu"))
    assert batch is not None
    return batch


def plain(y: torch.Tensor, x: torch.Tensor, layer: LoraLayer, slots: list[int]) -> torch.Tensor:
    """Row by row in float64."""
    wide = y.double()
    for row, slot in enumerate(slots):
        first = 0
        for part, width in enumerate(layer.widths if slot >= 0 else ()):
            low = layer.a[slot, part].double() @ x[row].double()
            wide[row, first : first + width] += low @ layer.b[slot, :, first : first + width].double()
            first += width
    return wide


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "widths", "rank", "inputs"),
    [
        ([0], (5,), 1, 3),
        ([2, -1, 0, 2, 2, -1], (16, 8, 8), 4, 24),
        ([1] * 40, (33, 31), 16, 65),
        ([-1, -1, 3, -1], (7,), 8, 64),
        ([*range(8)] * 4, (96, 32, 32), 16, 96),
        ([0] * 20 + [1] + [-1] * 5, (48,), 2, 17),
    ],
)
def test_each_row_gets_its_own_adapter(
    add_lora: AddLora, dtype: torch.dtype, slots: list[int], widths: tuple[int, ...], rank: int, inputs: int
) -> None:
    torch.manual_seed(len(slots))
    layer = random_layer(9, widths, rank, inputs, dtype)
    x, y = torch.randn(len(slots), inputs).to(dtype), torch.randn(len(slots), sum(widths)).to(dtype)
    wanted, before = plain(y, x, layer, slots), y.clone()
    add_lora(y, x, layer, batch_of(slots, [rank] * 9))
    torch.testing.assert_close(y.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    base = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[base], before[base])
    changed = [row for row, slot in enumerate(slots) if slot >= 0]
    assert not (y[changed] == before[changed]).all(1).any()


@ALL
def test_what_is_not_finite_in_one_adapter_stays_in_its_rows(add_lora: AddLora) -> None:
    torch.manual_seed(0)
    layer = random_layer(3, (8,), 4, 16, torch.float32)
    layer.a[1], layer.b[2] = torch.nan, torch.inf
    slots = [0, 1, -1, 2, 0]
    x, y = torch.randn(5, 16), torch.randn(5, 8)
    wanted = plain(y, x, layer, [0, -1, -1, -1, 0])
    add_lora(y, x, layer, batch_of(slots, [4, 4, 4]))
    torch.testing.assert_close(y[[0, 2, 4]].double(), wanted[[0, 2, 4]], rtol=1e-5, atol=1e-5)
    assert not y[[1, 3]].isfinite().all()


@ALL
def test_rows_of_zeros_above_an_adapter_s_rank_do_nothing(add_lora: AddLora) -> None:
    torch.manual_seed(0)
    layer = random_layer(2, (8, 8), 8, 16, torch.float32)
    layer.a[1, :, 2:], layer.b[1, 2:] = 0, 0
    small = LoraLayer(layer.a[:, :, :2].clone(), layer.b[:, :2].clone(), layer.widths)
    x, y = torch.randn(3, 16), torch.randn(3, 16)
    again = y.clone()
    add_lora(y, x, layer, batch_of([1, 1, 1], [8, 2]))
    add_lora(again, x, small, batch_of([1, 1, 1], [2, 2]))
    torch.testing.assert_close(y, again, rtol=1e-6, atol=1e-6)


@ALL
def test_an_output_that_is_part_of_a_wider_tensor(add_lora: AddLora) -> None:
    torch.manual_seed(0)
    layer = random_layer(1, (6,), 2, 5, torch.float32)
    whole = torch.randn(4, 10)
    before, x = whole.clone(), torch.randn(4, 5)
    wanted = plain(whole[:, 2:8], x, layer, [0, -1, 0, 0])
    add_lora(whole[:, 2:8], x, layer, batch_of([0, -1, 0, 0], [2]))
    torch.testing.assert_close(whole[:, 2:8].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[:, :2], before[:, :2])
    assert torch.equal(whole[:, 8:], before[:, 8:])


def test_a_batch_of_the_base_model_has_no_lora() -> None:
    assert lora_batch([-1, -1], [4], torch.device("cpu")) is None
    assert lora_batch([], [], torch.device("cpu")) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_lists_every_row_of_an_adapter_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots: Any = torch.randint(-1, 5, (30,), generator=generator).tolist()
    batch = batch_of(slots, [1, 2, 3, 4, 5])
    assert sorted(batch.rows.tolist()) == [row for row, slot in enumerate(slots) if slot >= 0]
    assert batch.gather[batch.valid].tolist() == batch.rows.tolist()
    size = len(batch.gather) // len(batch.active)
    for position, row in zip(batch.valid.tolist(), batch.rows.tolist(), strict=True):
        assert batch.active[position // size] == slots[row]
    assert batch.rank == max(slots) + 1
