"""LoRA of any mix of adapters: each row gets its own adapter's update, and the base model's rows none at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.native.lora import Tiles
from kernels.lora import LoraBatch, LoraLayer, lora_batch
from kernels.ops import NATIVE, implementation
from tests.support.lora_layers import layer_for

ALL = pytest.mark.parametrize("backend", ["reference", "cpu", NATIVE])
#: A sum of `rank` products of sums of `inputs` products, of numbers of the type; torch rounds the inner sums to it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def delta_of(backend: str, x: torch.Tensor, layer: LoraLayer, slots: list[int]) -> torch.Tensor:
    kernel, unembed = implementation("lora_delta", backend), implementation("unembed", backend)
    assert kernel is not None
    delta = kernel(x, layer_for(backend, layer), batch_of(slots))
    if backend == NATIVE:  # only its own layers can take it: one without weights, which answers in float32
        assert unembed is not None
        delta = unembed(torch.zeros(layer.b.shape[2], x.shape[1], dtype=x.dtype))(x, delta).values[
            :, : layer.b.shape[2]
        ]
    assert isinstance(delta, torch.Tensor)
    assert delta.dtype == torch.float32
    assert delta.shape == (len(x), layer.b.shape[2])
    return delta


def random_layer(
    slots: int, widths: tuple[int, ...], rank: int, inputs: int, dtype: torch.dtype = torch.float32, most: int = 0
) -> LoraLayer:
    """Adapters of a rank in slots for at least `most`."""
    a = torch.zeros(slots, len(widths), max(rank, most), inputs)
    b = torch.zeros(slots, max(rank, most), sum(widths))
    a[:, :, :rank] = torch.randn(slots, len(widths), rank, inputs) / inputs**0.5
    b[:, :rank] = torch.randn(slots, rank, sum(widths)) / rank**0.5
    return LoraLayer(a.to(dtype), b.to(dtype), np.full(slots, rank), np.array(widths))


def batch_of(slots: list[int]) -> LoraBatch:
    batch = lora_batch(slots, torch.device("cpu"))
    assert batch is not None
    return batch


def plain(x: torch.Tensor, layer: LoraLayer, slots: list[int]) -> torch.Tensor:
    """Row by row in float64."""
    delta = torch.zeros(len(x), layer.b.shape[2], dtype=torch.float64)
    for row, slot in enumerate(slots):
        first = 0
        for part, width in enumerate(layer.widths.tolist() if slot >= 0 else ()):
            low = layer.a[slot, part].double() @ x[row].double()
            delta[row, first : first + width] = low @ layer.b[slot, :, first : first + width].double()
            first += width
    return delta


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
        ([-1] * 30 + [4] * 9, (1, 2), 3, 1),
    ],
)
def test_each_row_gets_its_own_adapter(
    backend: str, dtype: torch.dtype, slots: list[int], widths: tuple[int, ...], rank: int, inputs: int
) -> None:
    torch.manual_seed(len(slots))
    layer = random_layer(9, widths, rank, inputs, dtype, most=rank + len(slots) % 3)
    x = torch.randn(len(slots), inputs).to(dtype)
    wanted, delta = plain(x, layer, slots), delta_of(backend, x, layer, slots)
    torch.testing.assert_close(delta.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    adapted = torch.tensor([slot >= 0 for slot in slots])
    assert not delta[~adapted].any()
    assert delta[adapted].any(1).all()


@ALL
def test_what_is_not_finite_in_one_adapter_stays_in_its_rows(backend: str) -> None:
    torch.manual_seed(0)
    layer = random_layer(3, (8,), 4, 16)
    layer.a[1], layer.b[2] = torch.nan, torch.inf
    x = torch.randn(5, 16)
    delta = delta_of(backend, x, layer, [0, 1, -1, 2, 0])
    wanted = plain(x, layer, [0, -1, -1, -1, 0])
    torch.testing.assert_close(delta[[0, 2, 4]].double(), wanted[[0, 2, 4]], rtol=1e-5, atol=1e-5)
    assert not delta[[1, 3]].isfinite().any()


@ALL
def test_ranks_differ_in_a_batch_and_an_adapter_may_leave_the_layer_as_it_is(backend: str) -> None:
    torch.manual_seed(0)
    layer = random_layer(3, (8, 8), 2, 16, most=8)
    wide = random_layer(1, (8, 8), 8, 16)
    layer.a[1], layer.b[1], layer.ranks[1] = wide.a[0], wide.b[0], 8
    layer.a[2], layer.b[2], layer.ranks[2] = 0, 0, 0
    x, slots = torch.randn(6, 16), [0, 1, 2, -1, 1, 2]
    delta = delta_of(backend, x, layer, slots)
    torch.testing.assert_close(delta.double(), plain(x, layer, slots), rtol=1e-5, atol=1e-5)
    assert not delta[[2, 3, 5]].any()


@ALL
def test_a_batch_whose_adapters_all_leave_the_layer_as_it_is(backend: str) -> None:
    layer = random_layer(2, (8,), 2, 16)
    layer.a.zero_(), layer.b.zero_(), layer.ranks.fill(0)
    assert not delta_of(backend, torch.randn(3, 16), layer, [0, 1, -1]).any()


@ALL
def test_an_input_that_is_part_of_a_wider_tensor(backend: str) -> None:
    torch.manual_seed(0)
    layer, slots = random_layer(1, (6,), 2, 5), [0, -1, 0, 0]
    x = torch.randn(4, 10)[:, 2:7]
    torch.testing.assert_close(
        delta_of(backend, x, layer, slots).double(), plain(x, layer, slots), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("backend", [NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_s_bits_depend_on_that_row_and_its_adapter_alone(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = random_layer(4, (40, 24), 16, 96, dtype)
    slots = torch.randint(-1, 4, (50,)).tolist()
    x = torch.randn(50, 96).to(dtype)
    together = delta_of(backend, x, layer, slots)
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(delta_of(backend, x[row : row + 1], layer, [slot])[0], together[row])


@pytest.mark.parametrize("backend", ["reference", NATIVE])
def test_the_embedding_of_a_token_gets_its_adapter_s_row(backend: str) -> None:
    torch.manual_seed(0)
    layer = LoraLayer(torch.randn(3, 1, 20, 4), torch.randn(3, 4, 12), np.array([4, 2, 4]), np.array([12]))
    layer.a[1, :, :, 2:], layer.b[1, 2:] = 0, 0
    ids, slots = torch.tensor([3, 19, 0, 7]), [1, -1, 0, 2]
    kernel = implementation("embed_delta", backend)
    assert kernel is not None
    delta = kernel(ids, layer_for(backend, layer, "embedding"), batch_of(slots))
    for row, slot in enumerate(slots):
        wanted = layer.a[slot, 0, ids[row]] @ layer.b[slot] if slot >= 0 else torch.zeros(12)
        torch.testing.assert_close(delta[row], wanted)


@pytest.mark.parametrize("backend", ["reference", "cpu", NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 37, 96])
def test_layers_add_a_delta_before_anything_else(backend: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(5, 24).to(dtype), (torch.randn(2 * width, 24) / 5).to(dtype)
    bias, slots = torch.randn(2 * width).to(dtype), [1, -1, 0, 0, 1]
    layer = random_layer(2, (width, width), 3, 24, dtype, most=4)
    product = x.double() @ weight.double().T + plain(x, layer, slots)
    shifted = product + bias.double()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}

    def make(operation: str, *arguments: Any) -> Any:
        kernel = implementation(operation, backend)
        assert kernel is not None
        return kernel(*arguments)

    def delta(kind: str) -> Any:
        return make("lora_delta", x, layer_for(backend, layer, kind), batch_of(slots))

    linear = make("linear", weight, bias)(x, delta("linear"))
    torch.testing.assert_close(linear.double(), shifted, **tolerance)
    gated = make("gated_linear", weight, bias)(x, delta("gated"))
    wanted = torch.nn.functional.silu(shifted[:, :width]) * shifted[:, width:]
    torch.testing.assert_close(gated.double(), wanted, **tolerance)
    logits = make("unembed", weight)(x, delta("linear"))
    torch.testing.assert_close(logits.values[:, : 2 * width].double(), product, **tolerance)
    torch.testing.assert_close(logits.peaks.amax(-1).double(), product.amax(-1), **tolerance)


def test_a_batch_of_the_base_model_has_no_lora() -> None:
    assert lora_batch([-1, -1], torch.device("cpu")) is None
    assert lora_batch([], torch.device("cpu")) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_lists_every_row_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots: Any = torch.randint(-1, 5, (30 + seed,), generator=generator).tolist()
    batch = batch_of(slots)
    assert sorted(batch.rows.tolist()) == [row for row, slot in enumerate(slots) if slot >= 0]
    assert batch.gather[batch.valid].tolist() == batch.rows.tolist()
    size = len(batch.gather) // len(batch.active)
    for position, row in zip(batch.valid.tolist(), batch.rows.tolist(), strict=True):
        assert batch.active[position // size] == slots[row]
    tiles = Tiles.of(batch)
    assert tiles.rows.tolist() == batch.rows.tolist()
    assert tiles.of_row.tolist() == slots
    assert tiles.active.tolist() == batch.active.tolist()
    for tile, slot in enumerate(tiles.slots.tolist()):
        rows = tiles.rows[tiles.firsts[tile] : tiles.firsts[tile + 1]]
        assert 1 <= len(rows) <= 8
        assert all(slots[row] == slot for row in rows)
