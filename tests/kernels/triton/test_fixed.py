"""What is described on the device alone: the same results as from the host's description, whatever lies behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention import AttentionBatch, AttentionGroup, FixedDecode
from kernels.blocked import BlockedLogits
from kernels.lora import TILE_ROWS, FixedRows, LoraLayer, lora_batch, most_tiles, tiled
from kernels.ops import Ops, ops_for
from kernels.reference.sampling import pack_counters, pack_filters
from kernels.triton import attention_plan

KV_HEADS, DIM, BLOCK = 2, 16, 16


@pytest.fixture(params=["reference", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_for("cpu", kernels=request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def decode(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch, torch.Tensor]:
    """Queries, a cache that is NaN wherever no key is, the batch as the host describes it, and its block tables."""
    used = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(used) + 1)
    cache = torch.full((len(blocks), BLOCK, 2, KV_HEADS, DIM), float("nan"))
    tables, first = torch.full((len(lengths), width), int(blocks[-1])), 0
    for row, (length, count) in enumerate(zip(lengths, used, strict=True)):
        tables[row, :count] = blocks[first : first + count]
        for position in range(length):
            cache[tables[row, position // BLOCK], position % BLOCK] = torch.randn(2, KV_HEADS, DIM)
        first += count
    ones = np.ones(len(lengths), dtype=np.int64)
    group = AttentionGroup(
        len(lengths), 1, len(lengths), tables.view(-1).clone(), max(lengths), ones, np.array(lengths)
    )
    query = torch.randn(len(lengths), 4, DIM)
    return query, cache, AttentionBatch(torch.zeros(len(lengths), dtype=torch.int64), [group]), tables


@pytest.mark.parametrize("lengths", [[1], [1, 16, 17, 40], [255, 256, 257, 3], [600, 1, 33]])
@pytest.mark.parametrize("spare", [0, 7])
def test_a_fixed_decode_attends_as_the_host_s_batch_does(ops: Ops, lengths: list[int], spare: int) -> None:
    width = -(-max(lengths) // BLOCK) + spare
    query, cache, batch, tables = decode(lengths, width)
    expected = ops_for("cpu", kernels="triton").paged_attention(query, cache, batch, 0.3)
    for dtype in (torch.int64, torch.int32):
        fixed = FixedDecode(torch.tensor(lengths, dtype=dtype), tables, width * BLOCK)
        found = ops.paged_attention(query, cache, AttentionBatch(batch.slot_mapping, fixed=fixed), 0.3)
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if ops.embed is TRITON.embed else 2e-6)


TRITON = ops_for("cpu", kernels="triton")


def test_long_sequences_have_the_cuts_that_the_host_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT_KEYS", 16)
    monkeypatch.setattr(attention_plan, "MOST_SPLITS", 4)
    lengths = [1, 16, 64, 65, 128, 129, 300]
    _, cache, batch, tables = decode(lengths, 20)
    expected = attention_plan.plan_attention(batch, 2, 16, len(cache), None)
    found = attention_plan.plan_fixed(FixedDecode(torch.tensor(lengths), tables, 320), None)
    assert expected.decode is not None
    assert found.decode is not None
    assert found.decode.rows.tolist() == expected.decode.rows.tolist()
    assert found.decode.splits >= expected.decode.splits


def lora_layer(slots: int, widths: tuple[int, ...], inputs: int) -> LoraLayer:
    a, b = torch.randn(slots, len(widths), 8, inputs), torch.randn(slots, 8, sum(widths))
    return LoraLayer(a, b, np.full(slots, 8), np.array(widths))


def fixed_rows(slots: list[int], count: int) -> FixedRows:
    order, tiles = tiled(np.array(slots), most_tiles(len(slots), count))
    return FixedRows(torch.tensor(slots), torch.from_numpy(order), torch.from_numpy(tiles).int())


@pytest.mark.parametrize(
    "slots", [[-1, -1], [0], [2, -1, 0, 0, -1], [1] * 17 + [-1] * 3 + [0] * 16, [2, 1, 0] * 11], ids=len
)
def test_fixed_rows_have_their_adapters(ops: Ops, slots: list[int]) -> None:
    x, layer = torch.randn(len(slots), 40), lora_layer(3, (24, 8), 40)
    found = ops.lora_delta(x, layer, fixed_rows(slots, 3))
    batch = lora_batch(slots, torch.device("cpu"))
    expected = torch.zeros_like(found) if batch is None else TRITON.lora_delta(x, layer, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not found[torch.tensor(slots) < 0].any()


def test_fixed_rows_of_an_embedding(ops: Ops) -> None:
    slots, ids = [1, -1, 0, 1], torch.tensor([3, 4, 5, 0])
    layer = LoraLayer(torch.randn(2, 1, 9, 8), torch.randn(2, 8, 12), np.full(2, 8), np.array([12]))
    batch = lora_batch(slots, torch.device("cpu"))
    assert batch is not None
    expected = TRITON.embed_delta(ids, layer, batch)
    torch.testing.assert_close(ops.embed_delta(ids, layer, fixed_rows(slots, 2)), expected, rtol=1e-5, atol=1e-5)


def test_tiles_are_of_one_slot_and_there_are_enough() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, count = int(rng.integers(1, 80)), int(rng.integers(1, 6))
        slots = rng.integers(-1, count, rows)
        order, tiles = tiled(slots, most_tiles(rows, count))
        assert sorted(order.tolist()) == list(range(rows))
        seen: list[int] = []
        for slot, first, size in tiles.T.tolist():
            assert size <= TILE_ROWS
            mine = order[first : first + size].tolist()
            assert all(slots[row] == slot for row in mine)
            seen += mine
        assert sorted(seen) == np.flatnonzero(slots >= 0).tolist()


def test_packed_numbers_and_draws_are_those_of_lists(ops: Ops) -> None:
    seeds, choices, positions = [0, 7, -3, 2**63 - 1, -(2**63)], [0, 1, 2, 3, 127], [0, 5, 2**31 - 1, 9, 1]
    expected = ops_for("cpu", kernels="reference").uniforms(seeds, choices, positions, torch.device("cpu"))
    found = ops.uniforms_packed(torch.from_numpy(pack_counters(seeds, choices, positions)))
    assert found.tolist() == expected.tolist()
    options: tuple[list[Any], ...] = ([0, 5, 40, 0, -1], [1.0, 0.8, 0.5, 0.2, 1.0], [0.0, 0.0, 0.05, 0.3, 1.0])
    x, heat = BlockedLogits.of(torch.randn(5, 40) * 3), torch.tensor([1.0, 0.7, 2.0, 1.0, 0.1])
    filters = torch.from_numpy(pack_filters(*options, vocab=40))
    tokens, thresholds = ops.draw_packed(x, heat, filters, found)
    wanted, limits = ops.draw(x, heat, *options, found)
    assert tokens.tolist() == wanted.tolist()
    assert thresholds.tolist() == limits.tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_a_row_that_is_not_finite_harms_no_other(ops: Ops) -> None:
    logits = torch.randn(4, 130)
    filters = torch.from_numpy(pack_filters([0, 3, 0, 4], [1.0, 1.0, 0.9, 0.9], [0.0, 0.1, 0.0, 0.0], vocab=130))
    uniform = torch.full((4,), 0.999, dtype=torch.float64)
    expected, _ = ops.draw_packed(BlockedLogits.of(logits), torch.ones(4), filters, uniform)
    logits[0, 7], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    tokens, _ = ops.draw_packed(BlockedLogits.of(logits), torch.ones(4), filters, uniform)
    assert int(tokens[3]) == int(expected[3])
