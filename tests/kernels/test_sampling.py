"""Random numbers against published vectors; filters and draws against plain Python."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from kernels.blocked import BLOCK, BlockedLogits
from kernels.ops import implementation, ops_for
from kernels.reference.sampling import DrawnRows, philox4x32, uniforms

# kat_vectors of the Random123 distribution.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_gives_the_published_words() -> None:
    counters = np.array([v[0] for v in VECTORS], dtype=np.uint32)
    keys = np.array([v[1] for v in VECTORS], dtype=np.uint32)
    assert philox4x32(counters, keys).tolist() == [list(v[2]) for v in VECTORS]


def test_uniforms_depend_on_each_of_seed_choice_and_position_alone() -> None:
    base = uniforms([5], [0], [0])[0]
    assert uniforms([9, 5, -3], [1, 0, 2], [7, 0, 1])[1] == base
    others = [*uniforms([6, 5, 5, 5 + 2**40, -5], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0])]
    assert len({base, *others}) == 6
    assert all(0.0 <= value < 1.0 for value in others)


def test_uniforms_of_a_few_rows_are_those_of_many() -> None:
    rng = random.Random(2)
    seeds = [-(2**63), 2**63 - 1, -1, 0, *(rng.randrange(-(2**63), 2**63) for _ in range(96))]
    choices, positions = [rng.randrange(128) for _ in seeds], [rng.randrange(2**20) for _ in seeds]
    rows = list(zip(seeds, choices, positions, strict=True))
    many = uniforms(seeds, choices, positions).tolist()
    assert [uniforms([seed], [choice], [position]).item() for seed, choice, position in rows] == many
    assert uniforms(seeds[:3], choices[:3], positions[:3]).tolist() == many[:3]
    assert uniforms([], [], []).shape == (0,)


def test_uniforms_are_uniform() -> None:
    values = uniforms([11] * 20000, [0] * 20000, list(range(20000)))
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    # Chi square with 19 degrees of freedom: 43.8 has probability 0.001.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8


def kept_by_filters(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """min-p, top-k and top-p as defined; ties with the last one kept stay."""
    best = max(logits)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    limit = -math.inf if min_p == 0 else best + math.log(min_p)
    limit = max(limit, logits[order[(top_k if 0 < top_k < len(order) else len(order)) - 1]])
    kept = [i for i in order if logits[i] >= limit - 1e-6]
    if top_p < 1.0:
        total = sum(math.exp(logits[i] - best) for i in kept)
        mass = 0.0
        for i in kept:
            mass += math.exp(logits[i] - best) / total
            if mass >= top_p:
                limit = max(limit, logits[i])
                break
        kept = [i for i in kept if logits[i] >= limit]
    return set(kept)


@pytest.fixture(params=["cpu", "reference", "cpu.native"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def draw(
    backend: str,
    logits: torch.Tensor,
    uniform: torch.Tensor,
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel, rows = implementation("draw", backend), len(logits)
    assert kernel is not None
    return kernel(
        BlockedLogits.of(logits),
        torch.ones(rows) if temperature is None else temperature,
        top_k or [0] * rows,
        top_p or [1.0] * rows,
        min_p or [0.0] * rows,
        uniform,
    )


def threshold(
    backend: str, logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]
) -> torch.Tensor:
    return draw(backend, logits, torch.zeros(len(logits), dtype=torch.float64), top_k, top_p, min_p)[1]


def off(rows: int) -> torch.Tensor:
    return torch.full((rows,), float("-inf"))


def mixed_filters(rows: int, vocab: int, seed: int) -> tuple[list[int], list[float], list[float]]:
    rng = random.Random(seed)
    return (
        [rng.choice([-1, 0, 1, 2, 5, vocab // 3, vocab - 1, vocab, vocab + 1]) for _ in range(rows)],
        [rng.choice([5e-324, 0.05, 0.4, 0.9, 0.999, 1 - 2**-53, 1.0, 1.0]) for _ in range(rows)],
        [rng.choice([0.0, 0.0, 5e-324, 0.02, 0.5, 1.0]) for _ in range(rows)],
    )


@pytest.mark.parametrize("vocab", [7, 100, 1024, 5000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_filters_keep_what_their_definitions_keep(backend: str, vocab: int, spread: float) -> None:
    torch.manual_seed(vocab)
    rows = 32
    logits = torch.randn(rows, vocab) * spread
    logits[3, : vocab // 2] = float("-inf")
    top_k, top_p, min_p = mixed_filters(rows, vocab, seed=vocab)
    limits = threshold(backend, logits, top_k, top_p, min_p)
    for row in range(rows):
        kept = {i for i in range(vocab) if logits[row, i] >= limits[row] and math.isfinite(logits[row, i])}
        expected = kept_by_filters(logits[row].double().tolist(), top_k[row], top_p[row], min_p[row])
        expected = {i for i in expected if math.isfinite(logits[row, i])}
        # Rounding may move the edge by one token; nothing of weight is left out near p = 1.
        allowed = 1 if top_p[row] < 0.9999 else len(expected) // 100 + 1
        assert len(kept ^ expected) <= allowed, (row, top_k[row], top_p[row], min_p[row])
        assert int(logits[row].argmax()) in kept


@pytest.mark.parametrize("vocab", [7, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "cpu.native"])
def test_cpu_filters_and_draws_are_those_of_the_reference(vocab: int, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(vocab)
    rows = 64
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    logits[5, 3:] = float("-inf")
    temperature = torch.rand(rows) * 2 + 0.01
    top_k, top_p, min_p = mixed_filters(rows, vocab, seed=vocab + 1)
    # With little left out, the two add up the vocabulary in other orders, and may differ by a token without weight.
    top_p = [min(p, 0.999) if p < 1.0 else p for p in top_p]
    uniform = torch.rand(rows, dtype=torch.float64)
    tokens, limits = draw(backend, logits, uniform, top_k, top_p, min_p, temperature)
    expected_tokens, expected_limits = draw("reference", logits, uniform, top_k, top_p, min_p, temperature)
    assert torch.equal(limits, expected_limits)
    assert torch.equal(tokens, expected_tokens)


def test_a_row_is_filtered_alike_alone_and_in_a_batch(backend: str) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 3000) * 2).bfloat16().float()  # many ties
    top_k, top_p, min_p = [3000, 3000, 7, 900, 3000], [0.95, 1.0, 0.5, 0.8, 0.3], [0.0, 0.1, 0.0, 0.0, 0.0]
    together = threshold(backend, logits, top_k, top_p, min_p)
    for row in range(5):
        one = slice(row, row + 1)
        assert threshold(backend, logits[one], top_k[one], top_p[one], min_p[one]) == together[row]


@pytest.mark.parametrize("top_p", [1e-9, 1e-300, 0.0001])
def test_a_tiny_top_p_leaves_the_maximum(backend: str, top_p: float) -> None:
    logits = torch.randn(3, 500)
    assert torch.equal(threshold(backend, logits, [0] * 3, [top_p] * 3, [0.0] * 3), logits.max(-1).values)


def test_a_top_p_near_one_leaves_all_that_has_weight(backend: str) -> None:
    logits = torch.randn(2, 3000) * 4
    limits = threshold(backend, logits, [0] * 2, [1 - 2**-53] * 2, [0.0] * 2)
    left_out = logits.double().softmax(-1).masked_fill(logits >= limits.unsqueeze(1), 0.0).sum(-1)
    assert bool((left_out < 1e-6).all())


def test_top_k_keeps_all_that_tie_with_the_last(backend: str) -> None:
    logits = torch.zeros(2, 1000)
    logits[:, 500] = 2.0
    logits[1, ::10] = 1.0
    logits[1, 500] = 2.0
    assert threshold(backend, logits, [3, 3], [1.0, 1.0], [0.0, 0.0]).tolist() == [0.0, 1.0]


def test_no_filter_filters_nothing(backend: str) -> None:
    logits = torch.randn(2, 50)
    assert torch.equal(threshold(backend, logits, [0, 50], [1.0, 1.0], [0.0, 0.0]), off(2))


@pytest.mark.parametrize("min_p", [0.0, 1e-9])
def test_draw_is_the_inverse_of_the_distribution_in_order_of_ids(backend: str, min_p: float) -> None:
    logits = torch.tensor([[0.1, 0.0, 0.2, 0.4, 0.3]]).log()
    points = [0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.6999, 0.7001, 1 - 2.0**-53]
    tokens = [int(draw(backend, logits, torch.tensor([u], dtype=torch.float64), min_p=[min_p])[0]) for u in points]
    assert tokens == [0, 0, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("k", [0, 13 * BLOCK // 2])
def test_draw_over_a_long_vocabulary_is_that_of_one_running_sum(backend: str, k: int) -> None:
    torch.manual_seed(5)
    rows, vocab = 300, 13 * BLOCK + 7
    logits = torch.randn(rows, vocab) * 3
    logits[::3, 4 * BLOCK : 8 * BLOCK] = float("-inf")  # blocks without any weight
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    tokens, limits = draw(backend, logits, uniform, top_k=[k] * rows)
    weight = logits.double().softmax(-1).masked_fill(logits < limits.unsqueeze(1), 0.0)
    weight /= weight.sum(-1, keepdim=True)
    token = tokens.unsqueeze(1)
    upper = weight.cumsum(-1).gather(1, token).squeeze(1)
    lower = upper - weight.gather(1, token).squeeze(1)
    assert bool(((uniform >= lower - 1e-6) & (uniform <= upper + 1e-6)).all())
    assert bool(logits.gather(1, token).isfinite().all())


def test_draw_stays_within_what_is_kept(backend: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(200, 64)
    tokens, limits = draw(backend, logits, torch.rand(200, dtype=torch.float64), top_k=[3] * 200)
    assert torch.equal(limits, logits.topk(3).values[:, -1])
    assert bool((logits.gather(1, tokens.unsqueeze(1)).squeeze(1) >= limits).all())


def test_where_only_the_maximum_is_kept_the_first_token_that_has_it_is_taken(backend: str) -> None:
    logits = torch.zeros(3, 200)
    logits[:, [150, 70, 90]] = 1.0
    # One step of float32 above, which the division takes away.
    logits[1, 150] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    uniform = torch.tensor([0.99, 0.0, 0.99], dtype=torch.float64)
    tokens, _ = draw(backend, logits, uniform, [1, 1, 0], [1.0, 1.0, 1e-9], temperature=torch.full((3,), 1.7))
    assert tokens.tolist() == [70, 150, 70]


def test_temperature_divides_before_anything_is_filtered_or_drawn(backend: str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(50, 300) * 2
    temperature = torch.rand(50) * 3 + 0.1
    uniform = torch.rand(50, dtype=torch.float64)
    filters: tuple[list[int], list[float], list[float]] = [40] * 50, [0.8] * 50, [0.01] * 50
    tokens, limits = draw(backend, logits, uniform, *filters, temperature)
    expected_tokens, expected_limits = draw(backend, logits / temperature.unsqueeze(1), uniform, *filters)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(limits, expected_limits)


def test_penalties_are_those_of_their_definitions() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    index = torch.tensor([0, 1, 2, 7])
    counts = torch.tensor([0.0, 1.0, 3.0, 1.0])  # token 0 of the first row is in the prompt alone
    ops_for("cpu").apply_penalties(
        logits, index, counts, torch.full((4,), 0.5), torch.full((4,), 0.25), torch.full((4,), 2.0)
    )
    assert logits.tolist() == [[1.0, -4.0 - 0.25 - 0.5, 0.5 - 0.75 - 0.5, 0.5], [1.0, 1.0, 1.0, -0.25]]


def test_rows_are_drawn_from_plain_numbers_as_from_tensors(backend: str) -> None:
    torch.manual_seed(6)
    x = BlockedLogits.of(torch.randn(20, 700) * 3)
    x.values[4], x.peaks[4], x.best[4] = math.nan, math.nan, math.nan  # a row that nobody draws
    rows = [0, 1, 3, 7, 8, 9, 10, 12, 15, 19]
    seeds = [-(2**63), 2**63 - 1, -1, 0, 5, 6, 7, 8, 9, 10]
    choices, positions = list(range(10)), [1000 * row for row in rows]
    heat, filters = [0.3 + 0.1 * row for row in rows], mixed_filters(10, 700, seed=1)
    rows_kernel, uniform_kernel = implementation("draw_rows", backend), implementation("uniforms", "reference")
    assert rows_kernel is not None
    assert uniform_kernel is not None
    found = rows_kernel(x, DrawnRows(rows, heat, *filters, seeds, choices, positions))
    uniform = uniform_kernel(seeds, choices, positions, torch.device("cpu"))
    expected, _ = draw(backend, x.values[rows, :700], uniform, *filters, torch.tensor(heat))
    assert found == expected.tolist()


def test_edited_rows_are_copies_with_maxima_of_their_own(backend: str) -> None:
    torch.manual_seed(7)
    raw = torch.randn(12, 330)
    x = BlockedLogits.of(raw)
    take, find = (
        implementation(name, backend) or implementation(name, "reference") for name in ("take_rows", "find_maxima")
    )
    assert take is not None
    assert find is not None
    rows = [1, 2, 5, 11]
    out = BlockedLogits.empty(len(rows), 330)
    take(x, rows, out)
    out.values[:, 70:80] = 9.0
    find(out)
    expected = raw[rows]
    expected[:, 70:80] = 9.0
    for found, wanted in zip((out.values, out.peaks, out.best), _parts(BlockedLogits.of(expected)), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(x.values[:, :330], raw)
    take(x, rows, out)
    out.values[2, 329] = math.nan
    find(out)
    assert out.best.isnan().tolist() == [False, False, True, False]
    assert out.peaks.isnan().sum() == 1


def _parts(x: BlockedLogits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.values, x.peaks, x.best
