"""Small parallel regions run on one thread, and leave the number of threads as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.attention import AttentionBatch, AttentionGroup
from kernels.cpu import linear as linears
from kernels.cpu import paged_attention as attentions
from kernels.cpu import threads
from kernels.cpu.rms_norm import rms_norm
from kernels.cpu.threads import FEW_ROWS, SMALL, alone, sharing, unless_awake


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def narrowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads that products and attentions which run alone see."""
    seen: list[int] = []

    def watched(call: object, *args: object) -> object:
        def inner(*inner_args: object) -> object:
            seen.append(torch.get_num_threads())
            return call(*inner_args)  # type: ignore[operator]

        return alone(inner, *args)

    monkeypatch.setattr(threads, "alone", watched)
    monkeypatch.setattr(attentions, "alone", watched)
    return seen


def _needs_openmp() -> None:
    if threads._set_threads() is None:
        pytest.skip("torch has other threads than OpenMP's")


def test_a_call_alone_has_one_thread_and_others_keep_theirs() -> None:
    _needs_openmp()
    elsewhere: list[int] = []

    def call(number: int) -> tuple[int, int]:
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
        return torch.get_num_threads(), number

    assert alone(call, 7) == (1, 7)
    assert elsewhere == [3]
    assert torch.get_num_threads() == 3


def test_a_call_that_fails_gives_the_threads_back() -> None:
    with pytest.raises(ZeroDivisionError):
        alone(lambda: 1 // 0)
    assert torch.get_num_threads() == 3


def test_without_openmp_a_call_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_set_threads", lambda: None)
    assert alone(torch.get_num_threads) == 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_pass_has_its_threads_for_small_products_too_and_gives_them_back(count: int) -> None:
    _needs_openmp()
    elsewhere: list[int] = []
    with sharing(count):
        assert torch.get_num_threads() == count
        assert unless_awake(torch.get_num_threads) == count
        assert alone(torch.get_num_threads) == 1
        assert torch.get_num_threads() == count
        other = threading.Thread(target=lambda: elsewhere.extend([torch.get_num_threads(), _unless_awake_there()]))
        other.start()
        other.join()
    assert elsewhere == [3, 1]
    assert (torch.get_num_threads(), unless_awake(torch.get_num_threads)) == (3, 1)


def _unless_awake_there() -> int:
    return unless_awake(torch.get_num_threads)


def test_a_pass_that_fails_gives_the_threads_back() -> None:
    with pytest.raises(ZeroDivisionError), sharing(2):
        _ = 1 // 0
    assert torch.get_num_threads() == 3
    assert not getattr(threads._pass, "awake", False)


def test_without_openmp_a_pass_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_set_threads", lambda: None)
    with sharing(1):
        assert torch.get_num_threads() == 3
        assert not getattr(threads._pass, "awake", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 8, 33])
def test_products_have_the_same_bits_on_any_number_of_threads(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    for columns, inner in ((960, 576), (576, 1536), (130, 70)):
        weight, x = torch.randn(columns, inner).to(dtype), torch.randn(rows, inner).to(dtype)
        layer = linears.linear(weight)
        answers = []
        for count in (1, 2, 3):
            with sharing(count):
                answers.append(layer(x).clone())
        answers.append(layer(x))
        assert all(torch.equal(answer, answers[0]) for answer in answers[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("bytes_", [SMALL // 32, SMALL, SMALL + 4096])
def test_few_rows_of_a_small_matrix_are_multiplied_alone(
    dtype: torch.dtype, rows: int, bytes_: int, narrowed: list[int]
) -> None:
    _needs_openmp()
    torch.manual_seed(0)
    inner = 512
    weight = torch.randn(bytes_ // dtype.itemsize // inner, inner).to(dtype)
    if not linears.packable(weight):
        pytest.skip("no oneDNN for this dtype here")
    x, delta = torch.randn(rows, inner).to(dtype), torch.randn(rows, len(weight))
    expected = x.double() @ weight.double().T
    layer = linears.linear(weight)
    for added in (None, delta):
        y = layer(x, added)
        wanted = expected if added is None else expected + added.double()
        assert y.shape == wanted.shape
        assert y.dtype == dtype
        assert torch.allclose(y.double(), wanted, rtol=2e-2, atol=0.3 if dtype == torch.bfloat16 else 1e-3)
    assert narrowed == ([1, 1] if rows <= FEW_ROWS and bytes_ <= SMALL else [])
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("keys", "alone_"), [(100, True), (40_000, False)])
def test_attention_of_one_row_is_alone_unless_it_reads_much(keys: int, alone_: bool, narrowed: list[int]) -> None:
    _needs_openmp()
    cache = torch.randn(-(-keys // 16), 16, 2, 1, 32)
    group = AttentionGroup(1, 1, 1, torch.arange(len(cache)), keys, np.array([1]), np.array([keys]))
    query = torch.randn(1, 2, 32)
    batch = AttentionBatch(torch.tensor([keys - 1]), [group])
    y = attentions.paged_attention(query, cache, batch, 0.2)
    key, value = cache.flatten(0, 1)[:keys, :, 0].unbind(1)
    weights = (query[0] @ key.T * 0.2).softmax(-1)
    assert torch.allclose(y.view(2, 32), weights @ value, atol=1e-4)
    assert narrowed == ([1] if alone_ else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_zeros_infinities_and_nans_are_normalised_alike(dtype: torch.dtype, rows: int) -> None:
    weight = torch.ones(8, dtype=dtype)
    assert torch.equal(rms_norm(torch.zeros(rows, 8, dtype=dtype), weight, 1e-5), torch.zeros(rows, 8, dtype=dtype))
    for odd in (float("inf"), float("nan")):
        x = torch.ones(rows, 8, dtype=dtype)
        x[-1, 3] = odd
        assert not rms_norm(x, weight, 1e-5)[-1, 3].isfinite()


def test_a_row_of_zeros_needs_no_epsilon() -> None:
    assert torch.equal(rms_norm(torch.zeros(1, 8), torch.ones(8), 0.0), torch.zeros(1, 8))
