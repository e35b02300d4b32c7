"""Native draws: those of the reference, and of a row's own logits, options and number alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from kernels.blocked import BlockedLogits
from kernels.cpu import native
from kernels.ops import NATIVE, implementation, ops_for
from tests.support.native import load_native

VOCABS = [1, 2, 63, 64, 65, 127, 1000, 1024, 5000]


@dataclass
class Rows:
    """Some rows with their options; `uniform` and `temperature` are [rows]."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    uniform: torch.Tensor

    def draw(self, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        kernel = implementation("draw", backend)
        assert kernel is not None
        x = BlockedLogits.of(self.logits)
        tokens, limits = kernel(x, self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        return tokens, limits

    def pick(self, rows: list[int]) -> Rows:
        options = ([each[row] for row in rows] for each in (self.top_k, self.top_p, self.min_p))
        return Rows(self.logits[rows], self.temperature[rows], *options, self.uniform[rows])


def logits_of_kind(kind: str, rows: int, vocab: int, rng: random.Random) -> torch.Tensor:
    logits = torch.randn(rows, vocab) * rng.choice([0.01, 0.5, 3.0, 8.0, 40.0])
    if kind == "ties":
        return logits.round()
    if kind == "bfloat16":
        return logits.bfloat16().float()
    if kind == "holes":
        logits[torch.rand(rows, vocab) < 0.8] = -math.inf
        logits[:, rng.randrange(vocab)] = 1.0
    elif kind == "far":
        logits += rng.choice([-1e5, 300.0, 1e5])
    elif kind == "outlier":
        logits[:, rng.randrange(vocab)] = rng.choice([1e30, -1e30, 60.0])
    elif kind == "equal":
        logits[:] = rng.choice([-70.0, 0.0, 3.5])
    return logits


def rows_of(kind: str, vocab: int, seed: int) -> Rows:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = rng.choice([1, 5, 33])
    temperatures = [1.0, 1.0, 0.7, 1.3, 0.01, 1e-5 if kind != "outlier" else 0.5, 100.0]
    return Rows(
        logits_of_kind(kind, rows, vocab, rng),
        torch.tensor([rng.choice(temperatures) for _ in range(rows)]),
        [rng.choice([-1, 0, 1, 2, 5, 50, vocab // 3, vocab - 1, vocab, vocab + 1]) for _ in range(rows)],
        # With less left out, sums in another order may keep another token, of no weight.
        [rng.choice([5e-324, 1e-9, 0.05, 0.4, 0.9, 0.95, 0.999, 1.0, 1.0]) for _ in range(rows)],
        [rng.choice([0.0, 0.0, 5e-324, 1e-9, 0.02, 0.5, 1.0]) for _ in range(rows)],
        # At the very ends a token without weight, or the last one with any, may be taken or not.
        torch.rand(rows, dtype=torch.float64) * 0.998 + 0.001,
    )


@pytest.mark.parametrize("kind", ["normal", "ties", "bfloat16", "holes", "far", "outlier", "equal"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_and_thresholds_are_those_of_the_reference(kind: str, vocab: int) -> None:
    load_native()
    for seed in range(40):
        rows = rows_of(kind, vocab, seed)
        tokens, limits = rows.draw(NATIVE)
        expected, expected_limits = rows.draw("reference")
        assert torch.equal(limits, expected_limits), seed
        assert torch.equal(tokens, expected), seed


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_drawn_alike_alone_and_in_any_batch(threads: int) -> None:
    load_native(1)
    torch.manual_seed(4)
    rng = random.Random(4)
    count, vocab = 64, 3001
    # With nearly all kept and many tokens, the last bits of sums decide.
    rows = Rows(
        torch.randn(count, vocab) * 2,
        torch.rand(count) + 0.5,
        [rng.choice([0, 0, 7, 2000]) for _ in range(count)],
        [rng.choice([0.3, 1 - 1e-9, 1 - 2**-53, 1.0]) for _ in range(count)],
        [rng.choice([0.0, 0.0, 1e-4]) for _ in range(count)],
        torch.rand(count, dtype=torch.float64),
    )
    tokens, limits = rows.draw(NATIVE)
    native.set_threads(threads)
    for some in ([0], [63], [5, 6, 7], list(range(20, 64)), list(range(63, -1, -1))):
        found, found_limits = rows.pick(some).draw(NATIVE)
        assert torch.equal(found, tokens[some])
        assert torch.equal(found_limits, limits[some])


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.95, 0.0), (0, 0.9, 0.01)])
def test_draws_follow_the_kept_tokens_probabilities(top_k: int, top_p: float, min_p: float) -> None:
    load_native()
    torch.manual_seed(8)
    count, logits = 40_000, torch.randn(300) * 2
    options = [top_k] * count, [top_p] * count, [min_p] * count
    uniform = torch.rand(count, dtype=torch.float64)
    rows = Rows(logits.expand(count, 300), torch.full((count,), 0.8), *options, uniform)
    tokens, limits = rows.draw(NATIVE)
    scaled = logits / torch.tensor(0.8)
    expected = count * scaled.double().masked_fill(scaled < limits[0], -math.inf).softmax(-1)
    found, often = tokens.bincount(minlength=300), expected >= 10
    assert bool((found[expected == 0] == 0).all())
    chi = float(((found - expected)[often] ** 2 / expected[often]).sum())
    degrees = int(often.sum())
    assert chi < degrees + 4 * math.sqrt(2 * degrees)


def test_what_is_not_finite_ends_in_some_token_and_leaves_others_alone() -> None:
    load_native()
    rows = rows_of("normal", 500, 3).pick([0, 0, 0, 0])
    alone, _ = rows.pick([3]).draw(NATIVE)
    rows.logits[0, 70], rows.logits[1, 7], rows.logits[2] = math.nan, math.inf, -math.inf
    tokens, limits = rows.draw(NATIVE)
    assert bool(((tokens >= 0) & (tokens < 500)).all())
    assert limits[:3].isnan().all()
    assert tokens[3] == alone[0]


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_logits_of_the_same_tensor_are_those_of_what_it_holds(rows: int) -> None:
    load_native()
    torch.manual_seed(2)
    ops, weight = ops_for("cpu", native=True), torch.randn(200, 30)
    head, hidden = ops.unembed(weight), torch.empty(rows, 30)
    for _ in range(3):
        hidden.normal_()
        found, fresh = head(hidden), ops.unembed(weight)(hidden.clone())
        assert torch.equal(found.values, fresh.values)
        assert torch.equal(found.peaks, fresh.values.view(rows, -1, 64).amax(-1))
        assert torch.equal(found.best, fresh.values.amax(-1))
        assert torch.equal(head(hidden[:1]).values, fresh.values[:1])
