"""Draws in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest

from kernels.triton import sampling
from tests.kernels.triton.sampling_checks import check_draw, check_rows_are_independent


@pytest.mark.parametrize(("vocab", "kind"), [(64, "flat"), (1000, "ties"), (5000, "peaked")])
def test_tokens_and_thresholds_are_the_reference_s(vocab: int, kind: str) -> None:
    check_draw(sampling, vocab, kind, seed=vocab)


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "few"])
def test_more_of_them(kind: str, seed: int) -> None:
    check_draw(sampling, 700 + 1500 * seed, kind, seed)


@pytest.mark.kernels
@pytest.mark.parametrize(("vocab", "kind"), [(1, "peaked"), (3001, "few"), (9000, "flat")])
def test_edges_and_large_ones(vocab: int, kind: str) -> None:
    check_draw(sampling, vocab, kind, seed=vocab)


@pytest.mark.kernels
def test_rows_are_independent() -> None:
    check_rows_are_independent(sampling)
