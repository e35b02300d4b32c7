"""What log probabilities are made of, against plain torch and Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.blocked import BLOCK, BlockedLogits
from kernels.ops import implementation

SIZES = [1, 7, BLOCK, 300, 1000, 5000]


@pytest.fixture(params=["cpu", "reference", "cpu.native"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(operation: str, backend: str, *args: Any) -> Any:
    kernel = implementation(operation, backend)
    assert kernel is not None
    return kernel(*args)


def logits(vocab: int, rows: int = 12) -> torch.Tensor:
    """Normal, with many ties, with -inf, all equal, and with zeros of both signs."""
    torch.manual_seed(vocab)
    values = torch.randn(rows, vocab) * 3
    values[1] = values[1].round()
    values[2, : vocab // 2] = float("-inf")
    values[3] = -1.5
    values[4] = torch.where(torch.rand(vocab) < 0.5, 0.0, -0.0)
    return values


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_hold_the_logits_and_their_maxima(vocab: int, dtype: torch.dtype) -> None:
    values = logits(vocab).to(dtype)
    x = BlockedLogits.of(values)
    assert torch.equal(x.values[:, :vocab], values.float())
    assert bool((x.values[:, vocab:] == float("-inf")).all())
    assert torch.equal(x.best, values.float().max(-1).values)
    assert torch.equal(x.peaks[:, 0], values[:, :BLOCK].float().max(-1).values)
    part = x.select([1, 4])
    assert torch.equal(part.values, x.values[[1, 4]])
    assert torch.equal(part.peaks, x.peaks[[1, 4]])
    assert torch.equal(part.best, x.best[[1, 4]])


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("count", [1, 5, 20, 300])
def test_the_largest_are_in_order_and_equal_ones_by_id(backend: str, vocab: int, count: int) -> None:
    values, count = logits(vocab), min(count, vocab)
    found, ids = run("largest", backend, BlockedLogits.of(values), count)
    for row, (own, tokens) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        order = sorted(range(vocab), key=lambda token: (-own[token], token))[:count]
        assert tokens == order, row
    assert torch.equal(found, values.gather(1, ids))


@pytest.mark.parametrize("vocab", SIZES)
def test_the_first_of_the_largest_is_the_arg_max(backend: str, vocab: int) -> None:
    values = logits(vocab)
    expected = [row.index(max(row)) for row in values.tolist()]
    assert run("argmax", backend, BlockedLogits.of(values)).tolist() == expected


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("offset", [0.0, 50.0, -80.0, 500.0, 3e4])
def test_logarithms_of_sums_of_exponentials(backend: str, vocab: int, offset: float) -> None:
    values = logits(vocab) + offset
    found = run("log_sum_exp", backend, BlockedLogits.of(values))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, values.double().logsumexp(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocab", SIZES)
def test_what_is_above_a_limit_is_counted(backend: str, vocab: int) -> None:
    values = logits(vocab)
    for limit in (values[:, vocab // 3], values.max(-1).values, torch.full((len(values),), float("-inf"))):
        pairs = zip(values.tolist(), limit.tolist(), strict=True)
        expected = [sum(value > least for value in row) for row, least in pairs]
        assert run("count_above", backend, BlockedLogits.of(values), limit).tolist() == expected
