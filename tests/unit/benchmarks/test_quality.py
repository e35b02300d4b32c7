"""The divergence that `benchmarks.quality` sums."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.quality import Divergence


def test_equal_distributions_do_not_diverge() -> None:
    found = Divergence()
    logprobs = torch.randn(7, 11, dtype=torch.float64).log_softmax(-1)
    found.add(logprobs, logprobs)
    assert found.kl == pytest.approx(0.0)
    assert (found.same, found.positions) == (7, 7)


def test_the_divergence_is_from_the_exact_one() -> None:
    found = Divergence()
    exact, other = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    found.add(other, exact)
    assert found.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-5)
    found.add(torch.tensor([[0.4, 0.6]]).log(), exact)
    assert (found.same, found.positions) == (1, 2)
