"""What is particular to the native kernels: sizes of all kinds, rows that depend on themselves, recorded steps."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import build_batch
from engine.host_batch import host_batch
from kernels.attention import AttentionBatch, AttentionGroup
from kernels.cpu import native
from kernels.cpu.native import operations
from kernels.cpu.native.program import CaptureError, Recorder, recording
from kernels.host_pass import HostPass
from kernels.lora import LoraLayer, LoraPass, lora_batch
from kernels.ops import NATIVE, Ops, is_native, ops_for
from kernels.packed import Packed
from tests.kernels.test_paged_attention import DIM, Pool
from tests.support.lora_layers import layer_for
from tests.support.native import load_native

#: Allowed difference of sums of about unit size; bfloat16: half a unit in the last place of results up to 8.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3.2e-2}
DTYPES = sorted(TOLERANCE, key=str)

#: Rows, columns in and out: one row, odd widths, panels that are full by one column or lack one, tiles of all heights.
SIZES = [(1, 1, 1), (1, 8, 5), (3, 7, 64), (12, 33, 31), (13, 34, 33), (25, 65, 32), (120, 18, 70), (121, 576, 97)]


@pytest.fixture
def ops() -> Ops:
    load_native()
    torch.manual_seed(5)
    return ops_for("cpu", native=True)


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((actual.double() - expected).abs().max()) <= TOLERANCE[actual.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_any_size(ops: Ops, dtype: torch.dtype, rows: int, width: int, out: int, with_bias: bool) -> None:
    x = torch.randn(rows, width).to(dtype)
    weight = (torch.randn(2 * out, width) / width**0.5).to(dtype)
    bias = torch.randn(2 * out).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert close(ops.linear(weight, bias)(x), expected)
    gate, up = expected.chunk(2, -1)
    assert close(ops.gated_linear(weight, bias)(x), gate / (1 + (-gate).exp()) * up)
    logits = ops.unembed(weight)(x)
    assert logits.vocab == 2 * out
    assert (logits.values[:, 2 * out :] == float("-inf")).all()
    assert float((logits.values[:, : 2 * out].double() - x.double() @ weight.double().T).abs().max()) <= 2e-5
    assert torch.equal(logits.peaks, logits.blocks.amax(-1))
    assert torch.equal(logits.best, logits.values.amax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (33, 7), (130, 64), (257, 31)])
def test_rows_of_a_packed_table_are_those_of_the_table(ops: Ops, dtype: torch.dtype, vocab: int, width: int) -> None:
    table, ids = torch.randn(vocab, width).to(dtype), torch.randint(vocab, (40,))
    packed = ops.pack(table)
    assert torch.equal(ops.embed(packed, ids), table[ids].float())
    assert torch.equal(ops.embed(packed, torch.arange(vocab)), table.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_take_what_was_packed_before(ops: Ops, dtype: torch.dtype) -> None:
    for width in (19, 64):
        x, weight, bias = torch.randn(5, width).to(dtype), torch.randn(70, width).to(dtype), torch.randn(70).to(dtype)
        assert torch.equal(ops.linear(ops.pack(weight), bias)(x), ops.linear(weight, bias)(x))
        gated = ops.pack(weight, gated=True)
        assert torch.equal(ops.gated_linear(gated, bias)(x), ops.gated_linear(weight, bias)(x))
        assert torch.equal(ops.unembed(ops.pack(weight))(x).values, ops.unembed(weight)(x).values)
        short = Packed(gated.data[:-1], *gated.shape, dtype)
        with pytest.raises(ValueError, match=rf"a packed weight of \(70, {width}\) has"):
            ops.gated_linear(short)


def test_a_layout_has_a_name_that_changes_with_it(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    name = native.layout()
    assert native.layout() == name
    real = operations.pack

    def otherwise(weight: torch.Tensor, gated: bool = False) -> Packed:
        packed = real(weight, gated)
        return Packed(packed.data.flip(0), *packed.shape, packed.dtype) if gated else packed

    monkeypatch.setattr(operations, "pack", otherwise)
    assert native.layout() != name


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_at_all(ops: Ops, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 4).to(dtype)
    x = torch.empty(0, 4, dtype=dtype)
    assert ops.linear(weight)(x).shape == (0, 6)
    assert ops.gated_linear(weight)(x).shape == (0, 3)
    assert ops.rms_norm(x, weight[0], 1e-5).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_tensor(ops: Ops, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(9, 50).to(dtype), torch.randn(20, 30).to(dtype)
    assert torch.equal(ops.linear(weight)(wide[:, 7:37]), ops.linear(weight)(wide[:, 7:37].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_stays_alone(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = torch.randn(30, 40).to(dtype), torch.randn(130, 40).to(dtype)
    x[7, 3], x[19, 0] = float("nan"), float("inf")
    fine = [row for row in range(30) if row not in (7, 19)]
    for result in (ops.linear(weight)(x), ops.gated_linear(weight)(x), ops.rms_norm(x, weight[0], 1e-5)):
        assert result[fine].isfinite().all()
        assert not result[7].isfinite().any()
        assert not result[19].isfinite().all()
    logits = ops.unembed(weight)(x)
    assert logits.best[7].isnan()
    assert not logits.best[19].isfinite()
    assert logits.best[fine].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_of_a_row_do_not_depend_on_the_others(ops: Ops, dtype: torch.dtype, threads: int) -> None:
    native.set_threads(threads)
    x, weight = torch.randn(130, 66).to(dtype), torch.randn(200, 66).to(dtype)
    for make in (ops.linear, ops.gated_linear, lambda weight: lambda x: ops.unembed(weight)(x).values):
        apply = make(weight)
        together = apply(x)
        for rows in (slice(0, 1), slice(5, 18), slice(129, 130), slice(64, 96)):
            assert torch.equal(apply(x[rows]), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_depend_on_chunks_and_company(ops: Ops, dtype: torch.dtype) -> None:
    pool = Pool(random.Random(9), 4, 2, dtype, 300)
    span = pool.span(0, 150)
    query = torch.randn(150, 6, DIM).to(dtype)

    def attend(start: int, count: int, *others: tuple[int, int]) -> torch.Tensor:
        part = type(span)(span.sequence, start, count, sample=False)
        company = [pool.span(*other) for other in others]
        batch = build_batch([part, *company], pool.layout)
        rows = torch.cat([query[start : start + count], torch.randn(sum(n for _, n in others), 6, DIM).to(dtype)])
        first = sum(([part, *company][index].count for index in batch.order[: batch.order.index(0)]), 0)
        rows = torch.cat([rows[count : count + first], rows[:count], rows[count + first :]])
        return ops.paged_attention(rows, pool.cache, batch.attention, 0.25)[first : first + count]

    whole = attend(0, 150)
    for start, count in ((149, 1), (63, 2), (64, 64), (0, 1), (17, 100)):
        assert torch.equal(attend(start, count), whole[start : start + count])
        assert torch.equal(attend(start, count, (30, 1), (0, 9)), whole[start : start + count])


@pytest.mark.parametrize("dim", [2, 6, 32, 34, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_serves_heads_of_any_even_size(ops: Ops, dim: int, dtype: torch.dtype) -> None:
    cache = torch.randn(3, 40, 2, 2, dim).to(dtype)
    query = torch.randn(1, 8, dim).to(dtype)
    pool = Pool(random.Random(0), 40, 2, dtype, 2)
    pool.free = [0, 1]
    batch = build_batch([pool.span(70, 1)], pool.layout)
    keys, values = (cache[[1, 0]].flatten(0, 1)[:71, part].double().repeat_interleave(4, 1) for part in (0, 1))
    weights = (torch.einsum("hd,khd->hk", query[0].double(), keys) * dim**-0.5).softmax(-1)
    expected = torch.einsum("hk,khd->hd", weights, values).view(1, -1)
    assert close(ops.paged_attention(query, cache, batch.attention, dim**-0.5), expected)


class Written:
    """A sequence's keys and values as `write_kv` has written them, in NaN, and its queries."""

    kv_heads, heads, length = 2, 6, 145

    def __init__(self, ops: Ops, block_size: int, kv: torch.Tensor, query: torch.Tensor) -> None:
        self._ops, self._block_size, self._query = ops, block_size, query
        self._table = torch.randperm(-(-self.length // block_size))
        shape = (len(self._table), block_size, 2, self.kv_heads, query.shape[2])
        self._cache = torch.full(shape, float("nan"), dtype=kv.dtype)
        slots = (self._table[:, None] * block_size + torch.arange(block_size)).flatten()[: self.length]
        for part in (slice(0, 1), slice(1, 38), slice(38, self.length)):
            ops.write_kv(kv[part], self._cache, slots[part])

    def attend(self, start: int, count: int) -> torch.Tensor:
        """Rows of so many queries from the first on."""
        end = start + count
        blocks = self._table[: -(-end // self._block_size)]
        group = AttentionGroup(1, count, count, blocks, end, np.array([count]), np.array([end]))
        rows = self._query[start:end]
        return self._ops.paged_attention(
            rows, self._cache, AttentionBatch(torch.empty(0), [group]), rows.shape[2] ** -0.5
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 34, 64])
def test_attention_over_what_was_written(ops: Ops, dtype: torch.dtype, dim: int) -> None:
    """However a block lies in memory: rows alone are as in company, and as with blocks of another size."""
    kv = torch.randn(Written.length, 2 * Written.kv_heads * dim).to(dtype)
    query = torch.randn(Written.length, Written.heads, dim).to(dtype)
    keys, values = (x.double().repeat_interleave(3, 1) for x in kv.view(len(kv), 2, Written.kv_heads, dim).unbind(1))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * dim**-0.5
    weights = scores.masked_fill(torch.ones(len(kv), len(kv)).triu(1).bool(), float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values).reshape(len(kv), -1)
    whole: torch.Tensor | None = None
    for block_size in (4, 16, 48, 1):
        written = Written(ops, block_size, kv, query)
        first = written.attend(0, len(kv))
        whole = first if whole is None else whole
        assert close(whole, expected)
        assert torch.equal(first, whole)
        for start, count in ((0, 1), (15, 1), (16, 1), (31, 2), (63, 3), (64, 64), (144, 1), (100, 45)):
            assert torch.equal(written.attend(start, count), whole[start : start + count])


@pytest.mark.parametrize("size", [1e4, 3e38])
def test_large_scores_are_a_choice_of_one_key(ops: Ops, size: float) -> None:
    pool = Pool(random.Random(0), 4, 1, torch.float32, 30)
    span = pool.span(80, 1)
    batch = build_batch([span], pool.layout)
    pool.cache[:, :, 0] = 0
    pool.slot(span, 66)[0] = 1.0
    query = torch.full((1, 1, DIM), size / DIM / 2)
    found = ops.paged_attention(query, pool.cache, batch.attention, 1.0)
    assert torch.equal(found[0], pool.slot(span, 66)[1, 0])


def chain(ops: Ops, dtype: torch.dtype) -> tuple[object, torch.Tensor]:
    """A small forward pass of every operation over a cache of one layer."""
    table = torch.randn(100, 32).to(dtype)
    tables = torch.randn(300, DIM).to(dtype), torch.randn(300, DIM).to(dtype)
    norm = torch.randn(32).to(dtype)
    qkv, out = ops.linear(torch.randn(6 * DIM, 32).to(dtype)), ops.linear(torch.randn(32, 4 * DIM).to(dtype))
    gated, down = ops.gated_linear(torch.randn(60, 32).to(dtype)), ops.linear(torch.randn(32, 30).to(dtype))

    def forward(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        lora: LoraPass | None = None,
    ) -> torch.Tensor:
        residual = ops.embed(table, tokens)
        cos, sin = (ops.embed(each, positions).unsqueeze(1) for each in tables)
        for layer in cache.unbind(0):
            x = ops.rms_norm(residual, norm, 1e-5)
            adapters = None if lora is None else lora.layers.get("qkv")
            delta = None if lora is None or adapters is None else ops.lora_delta(x, adapters, lora.batch)
            fused = qkv(x, delta)
            heads = fused.view(len(tokens), 6, DIM)
            ops.rotary(heads.narrow(1, 0, 5), cos, sin)
            ops.write_kv(fused.narrow(1, 4 * DIM, 2 * DIM), layer, batch.slot_mapping)
            x = ops.rms_norm(out(ops.paged_attention(heads.narrow(1, 0, 4), layer, batch, 0.25)), norm, 1e-5, residual)
            x = ops.rms_norm(down(gated(x)), norm, 1e-5, residual)
        return x

    return forward, torch.zeros(2, 201, 4, 2, 1, DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_pass_gives_the_bits_of_the_operations_one_by_one(ops: Ops, dtype: torch.dtype) -> None:
    forward, cache = chain(ops, dtype)
    other = cache.clone()
    step = ops.capture(forward, cache)
    pool = Pool(random.Random(3), 4, 1, dtype, 200)
    # Few rows, more than the program was recorded for, and few again.
    for counts in ([5, 1, 1], [100, 1, 90], [1], [3, 2]):
        spans = [pool.span(0, count) for count in counts]
        batch = build_batch(spans, replace(pool.layout, grouped=False))
        expected = forward(batch.tokens, batch.positions, other, batch.attention)
        for inputs in (host_batch(spans, 4), batch):  # numbers, and tensors as of a runner ahead of the device
            found = step(inputs, None)
            assert torch.equal(found, expected)
            assert torch.equal(cache, other)
            assert found.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_pass_with_adapters_gives_the_bits_of_the_operations_one_by_one(
    ops: Ops, dtype: torch.dtype
) -> None:
    forward, cache = chain(ops, dtype)
    other = cache.clone()
    step = ops.capture(forward, cache)
    pool = Pool(random.Random(3), 4, 1, dtype, 200)
    a, b = torch.randn(3, 1, 4, 32).to(dtype), torch.randn(3, 4, 6 * DIM).to(dtype)
    layers = {"qkv": layer_for(NATIVE, LoraLayer(a, b, np.array([4, 2, 3]), np.array([6 * DIM])))}
    plain = None
    for turn, counts in enumerate(([5, 1, 1], [100, 1, 90], [1], [3, 2], [5, 1, 1])):
        spans = [pool.span(0, count) for count in counts]
        batch = build_batch(spans, replace(pool.layout, grouped=False))
        rows = sum(counts)
        slots = lora_batch([row % 4 - 1 for row in range(1, rows + 1)], torch.device("cpu"))
        # The layers grow by one, which the recorded program does not know.
        lora = LoraPass({} if turn < 2 else layers, int(turn >= 2), slots)
        for adapted in (lora, None):
            expected = forward(batch.tokens, batch.positions, other, batch.attention, adapted)
            found = step(host_batch(spans, 4), adapted)
            assert torch.equal(found, expected)
            assert torch.equal(cache, other)
            if adapted is None:
                plain = found.clone()
            else:
                changed = found.clone()
        assert plain is not None
        assert torch.equal(changed, plain) == (turn < 2)


def test_a_pass_with_an_operation_of_torch_is_not_recorded(ops: Ops, caplog: pytest.LogCaptureFixture) -> None:
    table = torch.randn(9, 4)

    def forward(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        lora: LoraPass | None,
    ) -> torch.Tensor:
        return ops.embed(table, tokens).mul(2.0)

    step = ops.capture(forward, torch.zeros(0))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(step(HostPass([3, 1], [3, 1], [3, 1]), None), table[[3, 1]] * 2)
    assert [record.message for record in caplog.records] == [
        "the forward pass runs operation by operation: aten.mul.Tensor is computed by torch"
    ]


def test_a_pass_that_is_not_recorded_knows_its_sequences(ops: Ops) -> None:
    forward, cache = chain(ops, torch.float32)
    other = cache.clone()
    step = ops.capture(lambda *inputs: forward(*inputs) * 2.0, cache)
    pool = Pool(random.Random(3), 4, 1, torch.float32, 200)
    spans = [pool.span(0, 5), pool.span(0, 1), pool.span(0, 9)]
    batch = build_batch(spans, replace(pool.layout, grouped=False))
    expected = forward(batch.tokens, batch.positions, other, batch.attention) * 2.0
    assert torch.equal(step(host_batch(spans, 4), None), expected)
    assert torch.equal(cache, other)


def test_rows_of_another_number_are_not_recorded(ops: Ops) -> None:
    table, ids = torch.randn(9, 4), torch.tensor([3, 1, 2])
    with pytest.raises(CaptureError, match="an operation has 3 rows, the program 8"), recording(8):
        ops.embed(table, ids)


def test_a_program_reuses_memory_that_python_let_go_of() -> None:
    recorder = Recorder(16)
    first = recorder.empty(8, torch.float32)
    address, view = first.data_ptr(), first[:, 2:4]
    del first
    second = recorder.empty(8, torch.float32)
    assert second.data_ptr() != address  # a view is left
    del view
    assert recorder.empty(8, torch.float32).data_ptr() == address


def test_a_forked_process_has_threads_of_its_own() -> None:
    load_native()
    code = (
        "import os, torch\nfrom kernels.ops import ops_for\nfrom tests.support.native import load_native\n"
        "load_native()\napply, x = ops_for('cpu', native=True).linear(torch.randn(640, 64)), torch.randn(40, 64)\n"
        "expected = apply(x)\nchild = os.fork()\n"
        "if child == 0: os._exit(0 if torch.equal(apply(x), expected) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\nassert torch.equal(apply(x), expected)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_is_native(ops: Ops) -> None:
    assert is_native(ops)
    assert not is_native(ops_for("cpu"))
    assert not is_native(ops_for("cpu", deterministic=True, native=True))


def test_threads_run_where_they_are_pinned(ops: Ops) -> None:
    """In a process of its own, whose threads are all known."""
    cpus = sorted(os.sched_getaffinity(0))
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from engine.cache_folder import default_cache_dir\n"
        "from kernels.cpu import native\n"
        "from kernels.ops import ops_for\n"
        "native.load(default_cache_dir())\n"
        "apply = ops_for('cpu', native=True).linear(torch.randn(400, 64))\n"
        "def allowed():\n"
        "    apply(torch.randn(200, 64))\n"
        "    return {path.name: next(line.split()[1] for line in (path / 'status').read_text().splitlines()\n"
        "            if line.startswith('Cpus_allowed_list')) for path in Path('/proc/self/task').iterdir()}\n"
        "native.set_threads(1)\n"
        "before = allowed()\n"
        "for cpus in ([], [0, int(sys.argv[1])], []):\n"
        "    native.set_threads(2)\n"
        "    native.set_affinity(cpus)\n"
        "    after = allowed()\n"
        "    print(*[place for thread, place in after.items() if thread not in before])\n"
        "    assert all(after[thread] == place for thread, place in before.items() if thread in after)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(cpus[-1])], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    free, pinned, freed = done.stdout.splitlines()
    assert pinned == str(cpus[-1])
    if len(cpus) > 1:
        assert free == freed != pinned
