"""Tokens from a screened output matrix are those of all its logits, whatever the matrix and the rows are."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from kernels.cpu import native
from kernels.ops import Ops, ops_for
from kernels.reference.screen import Screen
from tests.support.native import load_native

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 3])
def ops(request: pytest.FixtureRequest) -> Ops:
    load_native()
    native.set_threads(request.param)
    torch.manual_seed(11)
    return ops_for("cpu", native=True)


ArgMax = Callable[[torch.Tensor], torch.Tensor]


def screened(ops: Ops, weight: torch.Tensor) -> tuple[ArgMax, ArgMax]:
    """The matrix without and with all logits."""
    head = ops.unembed(weight)
    screen: Screen | None = ops.screen(head)
    if screen is None:
        pytest.skip("matrices are not screened on this CPU")
    return lambda hidden: torch.tensor(screen(hidden), dtype=torch.int64), lambda hidden: ops.argmax(head(hidden))


def agree(found: torch.Tensor, expected: torch.Tensor, most_left: int = 0) -> bool:
    """Whether what was found is right, and at most so many rows were left."""
    told = found >= 0
    return torch.equal(found[told], expected[told]) and int((~told).sum()) <= most_left


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "vocab"), [(1, 1, 1), (1, 64, 900), (5, 30, 33), (13, 129, 1500), (125, 67, 130)]
)
def test_matrices_of_any_size(ops: Ops, dtype: torch.dtype, rows: int, width: int, vocab: int) -> None:
    screen, full = screened(ops, torch.randn(vocab, width).to(dtype))
    hidden = torch.randn(rows, width).to(dtype)
    assert agree(screen(hidden), full(hidden))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_rows_of_a_wider_tensor(ops: Ops, dtype: torch.dtype) -> None:
    screen, full = screened(ops, torch.randn(70, 24).to(dtype))
    wide = torch.randn(9, 50).to(dtype)
    assert screen(wide[:0, :24]).shape == (0,)
    assert agree(screen(wide[:, 11:35]), full(wide[:, 11:35].contiguous()))


def test_a_tensor_that_holds_other_rows_by_now_and_another_one(ops: Ops) -> None:
    screen, full = screened(ops, torch.randn(300, 24))
    # Rows as they are, and rows that have to be copied.
    for hidden in (torch.empty(4, 24), torch.empty(24, 4).T):
        for _ in range(3):
            hidden.copy_(torch.randn(4, 24))
            assert agree(screen(hidden), full(hidden.contiguous()))
        other = torch.randn(4, 24)
        assert agree(screen(other), full(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_equal_columns(ops: Ops, dtype: torch.dtype) -> None:
    weight = torch.randn(60, 40).to(dtype)
    order = torch.randint(60, (3000,))
    screen, full = screened(ops, weight[order])
    hidden = torch.randn(40, 40).to(dtype)
    found = screen(hidden)
    assert agree(found, full(hidden))
    assert all(int((order == order[token]).nonzero()[0]) == token for token in found.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_differ_in_a_last_bit(ops: Ops, dtype: torch.dtype) -> None:
    base = torch.randn(48).to(dtype)
    weight = base.repeat(100, 1)
    for row in range(1, 100):
        place = row % 48
        weight[row, place] = torch.nextafter(weight[row, place], torch.tensor(float(row % 5 - 2)).to(dtype))
    screen, full = screened(ops, torch.cat([torch.randn(500, 48).to(dtype) * 0.5, weight]))
    hidden = torch.cat([base.repeat(8, 1) + 0.01 * torch.randn(8, 48).to(dtype), torch.randn(8, 48).to(dtype)])
    assert agree(screen(hidden), full(hidden))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_candidates_than_are_kept(ops: Ops, dtype: torch.dtype) -> None:
    weight = torch.randn(1, 32).repeat(6000, 1) + 1e-3 * torch.randn(6000, 32)
    screen, full = screened(ops, weight.to(dtype))
    hidden = torch.randn(12, 32).to(dtype)
    assert agree(screen(hidden), full(hidden), most_left=12)
    assert (screen(hidden) < 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 300.0, 1e4, 1e9])
def test_outliers_in_rows_and_columns(ops: Ops, dtype: torch.dtype, size: float) -> None:
    weight, hidden = torch.randn(2000, 96), torch.randn(30, 96)
    weight[::7, 5] *= 1000
    weight[:, 60] *= 50
    hidden[::2, 5] *= 300
    hidden[::3, :20] *= 40
    hidden[5] = 0
    hidden[5, 60] = 1
    screen, full = screened(ops, weight.to(dtype))
    hidden = (hidden * size).to(dtype)
    assert agree(screen(hidden), full(hidden), most_left=3 if 1e-9 < size < 1e6 else 30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_zero_or_not_finite_are_left(ops: Ops, dtype: torch.dtype) -> None:
    weight, hidden = torch.randn(400, 50).to(dtype), torch.randn(20, 50).to(dtype)
    weight[17], weight[399] = 0, 0
    hidden[3], hidden[7, 2], hidden[9, 49], hidden[11] = 0, float("nan"), float("-inf"), 3e38
    screen, full = screened(ops, weight)
    found = screen(hidden)
    assert agree(found, full(hidden), most_left=4)
    assert found[[3, 7, 9, 11]].tolist() == [-1] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_logits_only(ops: Ops, dtype: torch.dtype) -> None:
    screen, full = screened(ops, -torch.rand(77, 33).to(dtype) - 0.5)
    hidden = torch.rand(6, 33).to(dtype) + 0.5
    assert agree(screen(hidden), full(hidden))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_matrix_that_is_not_finite_is_not_screened(ops: Ops, value: float, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(100, 20)
    screened(ops, weight)
    weight[63, 19] = value
    with caplog.at_level(logging.WARNING):
        assert ops.screen(ops.unembed(weight)) is None
    assert "not finite or very large" in caplog.text


def test_other_kernels_do_not_screen() -> None:
    plain = ops_for("cpu")
    assert plain.screen(plain.unembed(torch.randn(8, 4))) is None
