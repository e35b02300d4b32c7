"""SamplingParams: vLLM's names and defaults, and bounds that name the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shared.errors import InvalidRequestError
from shared.sampling import SamplingParams


def test_defaults_are_vllms() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
    assert p.stop is None and p.seed is None and p.logprobs is None and p.detokenize and p.skip_special_tokens
    assert p.stop_strings == [] and not p.greedy


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 129, 1.0, True, "1"]),
        ("top_k", [-2, 2**31, 0.5]),
        ("top_p", [0.0, -0.1, 1.0001, math.nan, "1", None]),
        ("min_p", [-0.1, 1.1, math.inf]),
        ("temperature", [-0.1, math.nan, math.inf, 10_001, True]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, -math.inf]),
        ("repetition_penalty", [0.0, -1.0, 101.0]),
        ("seed", [2**63, -(2**63) - 1, 1.5]),
        ("max_tokens", [0, -1, 2**31, 1.5]),
        ("min_tokens", [-1, 17]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("truncate_prompt_tokens", [0, -2, 2**31, -1.0, True]),
        ("top_logprobs", [-1, 21, True]),
        ("stop", [[""], "", ["a"] * 17, ["x" * 1025], [5], 3, b"a", {"a": 1}]),
        ("stop_token_ids", [[-1], [2**31], ["a"], [1] * 129, 3, "12"]),
        ("bad_words", [[""], ["x"] * 129, "word", 3]),
        ("ignore_eos", [1, "yes", None]),
        ("skip_special_tokens", [0, None]),
        ("logit_bias", [[1], 3, {-1: 0.0}, {1: 101.0}, {1: math.nan}, {"1": 0.0}, dict.fromkeys(range(1025), 0.0)]),
        ("allowed_token_ids", [[], [-1], [1] * (2**16 + 1), 3]),
    ],
)
def test_out_of_bounds_names_the_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_k", [-1, 0, 1, 2**31 - 1]),
        ("top_p", [1e-9, 1.0, 1]),
        ("min_p", [0, 1, 0.5]),
        ("temperature", [0, 0.0, 1e-300, 1e4]),
        ("seed", [None, 0, -(2**63), 2**63 - 1]),
        ("max_tokens", [None, 1, 2**31 - 1]),
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
        ("truncate_prompt_tokens", [None, -1, 1, 2**31 - 1]),
        ("logit_bias", [None, {}, {0: -100.0, 5: 100}]),
        ("stop", [None, [], "a", ["a", "b"]]),
    ],
)
def test_the_bounds_themselves_are_allowed(field: str, values: list[Any]) -> None:
    for value in values:
        SamplingParams(**{field: value})


def test_top_logprobs_is_another_name_of_logprobs() -> None:
    for given in ({"top_logprobs": 3}, {"logprobs": 3}, {"logprobs": 3, "top_logprobs": 3}):
        params = SamplingParams(**given)
        assert (params.logprobs, params.top_logprobs) == (3, None)
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(logprobs=2, top_logprobs=3)
    assert caught.value.param == "top_logprobs"


def test_stop_is_a_list_afterwards() -> None:
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(stop=["x", "y"]).stop_strings == ["x", "y"]


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-300, True), (9.9e-6, True), (1e-5, False), (1, False)]
)
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_what_contradicts_itself_is_refused() -> None:
    for field, params in (
        ("n", {"n": 2, "temperature": 0}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("stop", {"stop": ["x"], "detokenize": False}),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**params)  # type: ignore[arg-type]
        assert caught.value.param == field


def test_min_tokens_may_equal_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_named(field: str) -> None:
    params = SamplingParams(**{field: {100: 1.0} if field == "logit_bias" else [100]})
    params.check_vocabulary(101)
    with pytest.raises(InvalidRequestError, match="token id 100 is not in the vocabulary of 100 ids") as caught:
        params.check_vocabulary(100)
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_vocabulary(field: str) -> None:
    SamplingParams(**{field: 4}).check_vocabulary(4)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: 5}).check_vocabulary(4)  # type: ignore[arg-type]
    assert caught.value.param == field
