"""Operations of deterministic mode: a row gives the same bits alone, in any batch and at any position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement

import pytest
import torch

from engine.batch import build_batch
from engine.plan import Span
from kernels.invariant import paged_attention as attention
from kernels.invariant.exponential import prove_exponential, weights_
from kernels.invariant.linear import BASES
from kernels.invariant.row_sum import row_sum
from kernels.invariant.tiles import CALL_ROWS, Tensors, Tiled, cover, proven_sizes
from kernels.ops import Ops, ops_for
from tests.kernels.test_paged_attention import BATCHES, DIM, Pool, naive

DTYPES = [torch.float32, torch.bfloat16]
SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return ops_for("cpu", deterministic=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(17)


@pytest.fixture(autouse=True, params=[1])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


one_and_two_threads = pytest.mark.parametrize("threads", [1, 2], indirect=True)


def rows_by_themselves(kernel: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rng: random.Random) -> bool:
    """Whether rows give the same bits all together, one by one, and in batches of random size and order."""
    expected = kernel(x.clone())
    alone = torch.cat([kernel(row.clone()) for row in x.split(1)])
    if not torch.equal(alone, expected):
        return False
    for _ in range(6):
        picked = torch.tensor([rng.randrange(len(x)) for _ in range(rng.randrange(1, 90))])
        if not torch.equal(kernel(x[picked]), expected[picked]):
            return False
    return True


# Tiles


def test_a_cover_holds_all_rows_and_spares_less_than_its_last_tile() -> None:
    for sizes in [(1,), (8,), (1, 2, 4, 8), (4, 6, 64), (3, 7, 50)]:
        for rows in range(1, 200):
            tiles = cover(sizes, rows)
            assert set(tiles) <= set(sizes)
            assert rows <= sum(tiles) < rows + tiles[-1]
            assert list(tiles) == sorted(tiles, reverse=True)


def test_a_cover_is_cheap() -> None:
    sizes = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert cover(sizes, 1) == (1,)
    assert cover(sizes, 32) == (32,)
    assert cover(sizes, 33) == (32, 1)
    assert cover(sizes, 47) == (48,)
    for rows in range(1, 40):
        found = cover((2, 15, 40), rows)
        options = [tiles for count in range(1, 4) for tiles in combinations_with_replacement((2, 15, 40), count)]
        least = min(sum(tiles) + CALL_ROWS * len(tiles) for tiles in options if sum(tiles) >= rows)
        assert sum(found) + CALL_ROWS * len(found) == least


def test_tiles_are_all_that_is_called_and_padding_is_zeros() -> None:
    seen: list[torch.Tensor] = []

    def run(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        seen.append(x)
        return x + y, x[:, 0]

    tiled = Tiled(run, (4, 16))
    x, y = torch.randn(35, 3), torch.randn(35, 3)
    total, first = tiled(x, y)
    assert [len(tile) for tile in seen] == [16, 16, 4]
    assert torch.equal(total, x + y)
    assert torch.equal(first, x[:, 0])
    assert torch.equal(seen[-1][3], torch.zeros(3))


# Proofs


def matmul(weight: torch.Tensor) -> Callable[[torch.Tensor], Tensors]:
    """Sums one term after the other, whatever the number of rows."""

    def run(x: torch.Tensor) -> Tensors:
        total = torch.zeros(len(x), len(weight), dtype=torch.float32)
        for k in range(weight.shape[1]):
            total = total + x[:, k : k + 1].float() * weight[:, k].float()
        return (total.to(x.dtype),)

    return run


def prove(run: Callable[[torch.Tensor], Tensors]) -> tuple[int, ...]:
    return proven_sizes([(run, (torch.randn(64, 24),))], SIZES, BASES)


def test_a_function_of_rows_is_proven_at_all_sizes() -> None:
    assert prove(matmul(torch.randn(10, 24))) == SIZES


def test_a_position_dependent_function_is_left_with_single_rows() -> None:
    inner = matmul(torch.randn(10, 24))

    def run(x: torch.Tensor) -> Tensors:
        return (inner(x)[0] * (1 + torch.arange(len(x)).unsqueeze(1) * 2.0**-23),)

    assert prove(run) == (1,)


def test_one_deviating_position_is_found() -> None:
    inner = matmul(torch.randn(10, 24))

    def run(x: torch.Tensor) -> Tensors:
        out = inner(x)[0]
        if len(x) == 64:
            out[61, 7] = torch.nextafter(out[61, 7], torch.tensor(torch.inf))
        return (out,)

    assert prove(run) == SIZES[:-1]


def test_a_size_with_another_order_of_sums_is_dropped() -> None:
    weight = torch.randn(10, 24)
    whole, low, high = matmul(weight), matmul(weight[:, :12]), matmul(weight[:, 12:])

    def run(x: torch.Tensor) -> Tensors:
        if len(x) in (1, 2, 32):
            return (low(x[:, :12])[0] + high(x[:, 12:])[0],)
        return whole(x)

    assert prove(run) == (4, 8, 16, 64)


def test_a_dependence_on_other_rows_is_found() -> None:
    inner = matmul(torch.randn(10, 24))

    def run(x: torch.Tensor) -> Tensors:
        return (inner(x)[0] + x.abs().max() * 1e-6,)

    assert prove(run) == (1,)


def test_what_is_not_repeatable_is_refused() -> None:
    inner, calls = matmul(torch.randn(10, 24)), iter(range(10**6))

    def run(x: torch.Tensor) -> Tensors:
        return (inner(x)[0] + next(calls) * 1e-5,)

    with pytest.raises(ValueError, match="same bits"):
        prove(run)


def test_cancelling_terms_show_another_order_in_bfloat16() -> None:
    """Where a narrow result hides nearly every difference, the trials on layers must not."""
    from kernels.invariant.linear import _sizes

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        whole, low, high = matmul(weight), matmul(weight[:, :20]), matmul(weight[:, 20:])

        def apply(x: torch.Tensor) -> torch.Tensor:
            if len(x) < 8:
                return whole(x)[0]
            return (low(x[:, :20].float())[0] + high(x[:, 20:].float())[0]).bfloat16()

        return apply

    sizes = _sizes(make, (6, 48), False, torch.bfloat16, torch.device("cpu"), 1)
    assert max(sizes) < 8 or min(sizes) >= 8


# Rows


@one_and_two_threads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("out", "width"), [(96, 48), (160, 80), (38, 17), (320, 256), (2, 130)])
def test_linear_layers(ops: Ops, dtype: torch.dtype, with_bias: bool, out: int, width: int) -> None:
    rng = random.Random(out)
    weight = (torch.randn(out, width) / width**0.5).to(dtype)
    bias = torch.randn(out).to(dtype) if with_bias else None
    x = (torch.randn(70, width) * 3).to(dtype)
    assert rows_by_themselves(ops.linear(weight, bias), x, rng)
    assert rows_by_themselves(ops.gated_linear(weight, bias), x, rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 65, 576, 40000])
def test_rms_norm(ops: Ops, dtype: torch.dtype, width: int) -> None:
    weight = torch.randn(width).to(dtype)

    def with_residual(x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, weight, 1e-5, x.flip(-1))

    x = torch.randn(23, width).to(dtype)
    assert rows_by_themselves(lambda x: ops.rms_norm(x, weight, 1e-5), x, random.Random(1))
    assert rows_by_themselves(with_residual, x, random.Random(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [6, 16, 64])
def test_rotary(ops: Ops, dtype: torch.dtype, dim: int) -> None:
    cos, sin = torch.randn(70, 1, dim).to(dtype), torch.randn(70, 1, dim).to(dtype)
    index = torch.arange(70.0).to(dtype).view(70, 1, 1)  # each row brings its position along

    def rotate(x: torch.Tensor) -> torch.Tensor:
        position = x[:, 0, 0].long()
        values = x[:, :, 1:].contiguous()
        ops.rotary(values, cos[position], sin[position])
        return values

    assert rows_by_themselves(
        rotate, torch.cat((index.expand(70, 5, 1), torch.randn(70, 5, dim).to(dtype)), -1), random.Random(3)
    )
    x = torch.randn(7, 3, dim).to(dtype)
    plain = x.clone()
    ops_for("cpu").rotary(plain, cos[:7], sin[:7])
    ops.rotary(x, cos[:7], sin[:7])
    assert torch.allclose(x.float(), plain.float(), atol=1e-5 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [5, 80, 1537])
def test_silu_and_mul(ops: Ops, dtype: torch.dtype, inner: int) -> None:
    x = (torch.randn(70, 2 * inner) * 4).to(dtype)
    assert rows_by_themselves(ops.silu_and_mul, x, random.Random(4))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert torch.allclose(ops.silu_and_mul(x), ops_for("cpu").silu_and_mul(x), rtol=tolerance, atol=tolerance)


def test_silu_and_mul_at_the_ends_of_the_range(ops: Ops) -> None:
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]])
    assert torch.equal(ops.silu_and_mul(torch.cat((gate, torch.ones(1, 5)), -1)), torch.nn.functional.silu(gate))


def test_weights_of_what_is_far_below_the_largest_are_zero() -> None:
    x = torch.tensor([0.0, -1.0, -79.0, -81.0, -1e30, -torch.inf])
    assert torch.equal(weights_(x.clone()), torch.cat((x[:3].exp(), torch.zeros(3))))
    assert weights_(torch.tensor([torch.nan])).isnan().all()


def test_an_exponential_that_depends_on_its_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prove_exponential(torch.device("cpu"))

    def exp_(x: torch.Tensor) -> torch.Tensor:
        rounded = x.exp()
        rounded[len(x) // 8 * 8 :] *= 1 + 2.0**-23  # as where the end of a vector is computed by other code
        return rounded

    monkeypatch.setattr(torch.Tensor, "exp_", exp_)
    prove_exponential.cache_clear()
    with pytest.raises(ValueError, match="depend on an element's place"):
        prove_exponential(torch.device("cpu"))


@pytest.mark.parametrize("length", [1, 7, 576, 40000])
def test_row_sum(length: int) -> None:
    x = torch.randn(9, length)
    assert torch.allclose(row_sum(x).double(), x.double().sum(-1, keepdim=True), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_stays_alone(ops: Ops, dtype: torch.dtype) -> None:
    weight = (torch.randn(96, 48) / 7).to(dtype)
    norm = torch.randn(48).to(dtype)
    kernels = [ops.linear(weight), ops.gated_linear(weight), lambda x: ops.rms_norm(x, norm, 1e-5), ops.silu_and_mul]
    x = torch.randn(37, 48).to(dtype)
    for kernel in kernels:
        expected = kernel(x)
        for row, value in [(0, torch.nan), (5, torch.inf), (36, -torch.inf)]:
            broken = x.clone()
            broken[row] = value
            actual = kernel(broken)
            others = torch.arange(37) != row
            assert torch.equal(actual[others], expected[others])
            assert not actual[row].isfinite().all() or kernel is kernels[-1]


# Attention


def attend(
    ops: Ops, pool: Pool, spans: list[Span], queries: dict[int, torch.Tensor]
) -> dict[tuple[int, int], torch.Tensor]:
    """Results by sequence and position; `queries` hold those of all positions, by sequence."""
    batch = build_batch(spans, pool.layout)
    spans = [spans[index] for index in batch.order]
    query = torch.cat([queries[id(s.sequence)][s.start : s.start + s.count] for s in spans])
    result = ops.paged_attention(query, pool.cache, batch.attention, 0.4)
    keys = [(id(s.sequence), position) for s in spans for position in range(s.start, s.start + s.count)]
    return dict(zip(keys, result, strict=True))


@one_and_two_threads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(4, 4, 16), (6, 2, 5), (3, 1, 1), (14, 2, 16)])
def test_attention_alone_in_groups_chunked_and_as_decodes(
    ops: Ops, dtype: torch.dtype, heads: int, kv_heads: int, block_size: int
) -> None:
    rng = random.Random(heads * block_size)
    pool = Pool(rng, block_size, kv_heads, dtype, 900)
    lengths = [1, 63, 64, 65, 130, 200]
    whole = [pool.span(0, length) for length in lengths]
    queries = {id(s.sequence): torch.randn(s.count, heads, DIM).to(dtype) for s in whole}
    expected = attend(ops, pool, whole, queries)

    def check(spans: list[Span]) -> None:
        for key, row in attend(ops, pool, spans, queries).items():
            assert torch.equal(row, expected[key]), key

    def cut(span: Span, start: int, count: int) -> Span:
        return Span(span.sequence, start, count, sample=True)

    for span in whole:
        check([span])
        check([cut(span, span.count - 1, 1)])
    for _ in range(25):
        spans = []
        for span in rng.sample(whole, rng.randrange(1, len(whole) + 1)):
            start = rng.randrange(span.count)
            most = span.count - start
            spans.append(cut(span, start, rng.choice([1, 1, min(most, 2), rng.randrange(1, most + 1)])))
        check(spans)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_gives_the_references_values(ops: Ops, name: str, dtype: torch.dtype) -> None:
    pool = Pool(random.Random(5), 4, 2, dtype, 120)
    spans = [pool.span(start, count) for start, count in BATCHES[name]]
    query = torch.randn(sum(span.count for span in spans), 8, DIM).to(dtype).narrow(1, 0, 6)
    batch = build_batch(spans, pool.layout)
    spans = [spans[index] for index in batch.order]
    actual = ops.paged_attention(query, pool.cache, batch.attention, DIM**-0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(actual.double(), naive(pool, spans, query, DIM**-0.5), atol=tolerance)


def test_attention_reads_nothing_behind_a_sequences_end(ops: Ops) -> None:
    pool = Pool(random.Random(2), 4, 1, torch.float32, 40)
    spans = [pool.span(5, 1), pool.span(17, 1), pool.span(0, 3)]
    query = torch.randn(5, 2, DIM)
    batch = build_batch(spans, pool.layout)
    before = ops.paged_attention(query, pool.cache, batch.attention, 1.0)
    used = {(s.sequence.block_table[p // 4], p % 4) for s in spans for p in range(s.start + s.count)}
    for block in range(41):
        for offset in range(4):
            if (block, offset) not in used:
                pool.cache[block, offset] = torch.nan
    assert torch.equal(ops.paged_attention(query, pool.cache, batch.attention, 1.0), before)


def test_a_sequence_that_is_not_finite_stays_alone(ops: Ops) -> None:
    pool = Pool(random.Random(6), 4, 2, torch.float32, 200)
    spans = [pool.span(70, 1), pool.span(66, 1), pool.span(80, 1), pool.span(0, 30), pool.span(10, 30)]
    queries = {id(s.sequence): torch.randn(s.start + s.count, 4, DIM) for s in spans}
    expected = attend(ops, pool, spans, queries)
    sick = [id(spans[1].sequence), id(spans[3].sequence)]
    for span in (spans[1], spans[3]):
        pool.cache[span.sequence.block_table[2]] = torch.nan
    queries[sick[1]][3] = torch.inf
    for (sequence, position), row in attend(ops, pool, spans, queries).items():
        if sequence not in sick:
            assert torch.equal(row, expected[sequence, position])
        elif sequence == sick[0]:
            assert row.isnan().all()


@pytest.fixture
def fresh_proofs() -> Iterator[None]:
    attention.proven_pieces.cache_clear()
    yield
    attention.proven_pieces.cache_clear()


def test_attention_over_a_position_dependent_product_is_refused(
    monkeypatch: pytest.MonkeyPatch, fresh_proofs: None
) -> None:
    plain = attention._scores

    def scores(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Tensors:
        score, top = plain(query, key, bound)
        return score + torch.arange(score.shape[1]).unsqueeze(1) * 1e-6, top

    monkeypatch.setattr(attention, "_scores", scores)
    with pytest.raises(ValueError, match="heads of 16"):
        attention.proven_pieces(DIM, torch.device("cpu"), 1)


def test_attention_drops_tiles_with_another_order_of_sums(monkeypatch: pytest.MonkeyPatch, fresh_proofs: None) -> None:
    plain = attention._scores

    def scores(query: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> Tensors:
        if query.shape[1] == 16 or len(query) == 256:
            half = DIM // 2
            free = torch.full_like(bound, torch.inf)
            score = plain(query[..., :half].contiguous(), key[..., :half].contiguous(), free)[0]
            score = score + plain(query[..., half:].contiguous(), key[..., half:].contiguous(), free)[0]
            score = torch.minimum(score, bound)
            return score, score.amax(-1)
        return plain(query, key, bound)

    monkeypatch.setattr(attention, "_scores", scores)
    pieces = attention.proven_pieces(DIM, torch.device("cpu"), 1)
    assert 16 not in pieces
    assert pieces
    assert all(256 not in sizes for sizes in pieces.values())
