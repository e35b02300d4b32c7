"""Deterministic mode: what a request is answered, log probabilities to the last bit, depends on the request alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import LLM
from engine.outputs import Logprob, RequestOutput
from shared.sampling import SamplingParams
from tests.support.native import load_native
from tests.support.tiny_llama import VOCAB, save_tiny_model

Request = tuple[dict[str, Any], SamplingParams]
#: Ids, ends and all log probabilities of a request's choices, and those of its prompt.
Answer = tuple[list[Any], list[Any]]

MODEL = "smollm2-135m-instruct"
DTYPES = ["float32", "bfloat16"]
#: Options of the requests in turn, with log probabilities where a choice has none else.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "logprobs": 5},
    {"temperature": 1.0, "top_p": 0.9, "n": 2},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0, "prompt_logprobs": 3},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 0.9, "prompt_logprobs": 0, "logit_bias": {5: 2.0}},
]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """One, for speed: two wait for each other more than they compute here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(llm: LLM, requests: list[Request]) -> list[Answer]:
    """Of all requests in one moving batch."""
    prompts, params = zip(*requests, strict=True)
    return [_answer(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def alone(llm: LLM, requests: list[Request]) -> list[Answer]:
    """Of one request after the other."""
    return [answers(llm, [request])[0] for request in requests]


def _answer(output: RequestOutput) -> Answer:
    assert output.error is None
    assert output.outputs
    choices = [
        (choice.token_ids, choice.finish_reason, [_values(each) for each in choice.logprobs or []])
        for choice in output.outputs
    ]
    assert all(len(ids) == len(logprobs) > 0 for ids, _, logprobs in choices)
    return choices, [None if each is None else _values(each) for each in output.prompt_logprobs or []]


def _values(candidates: dict[int, Logprob]) -> dict[int, tuple[float, int]]:
    return {token: (entry.logprob, entry.rank) for token, entry in candidates.items()}


def mixed(lengths: list[int], vocab: int, tokens: int, shared: int) -> list[Request]:
    """Requests with prompts of these lengths; every second one begins with `shared` common tokens."""
    rng = random.Random(3)
    start = [rng.randrange(3, vocab) for _ in range(shared)]
    requests: list[Request] = []
    for index, length in enumerate(lengths):
        begin = start[: max(0, length - 2)] if index % 2 else []
        ids = begin + [rng.randrange(3, vocab) for _ in range(length - len(begin))]
        options = {"logprobs": 2, "seed": index, "max_tokens": tokens - index % 5, "ignore_eos": index % 3 == 0}
        params = SamplingParams(**(options | OPTIONS[index % len(OPTIONS)]))
        requests.append(({"prompt_token_ids": ids}, params))
    return requests


# A tiny model of random weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deterministic") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["torch", "native"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> str:
    """Both kinds of kernels that a CPU has for this."""
    if request.param == "native":
        load_native(1)
    return str(request.param)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed([1, 2, 70, 17, 64, 150, 65, 33, 9, 128, 40, 63, 5, 97, 180, 30], VOCAB, 24, 30)


Tiny = Callable[..., LLM]


@pytest.fixture(scope="module")
def tiny(folder: Path, dtype: str, kernels: str) -> Tiny:
    def load(**options: Any) -> LLM:
        settings: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "enable_prefix_caching": False}
        settings |= {"dtype": dtype, "deterministic": True, "cpu_kernels": kernels, "cache_dir": folder / "cache"}
        return LLM(str(folder), **(settings | options))

    return load


@pytest.fixture(scope="module")
def expected(tiny: Tiny, requests: list[Request]) -> list[Answer]:
    """Each request alone, its prompt in one pass."""
    return alone(tiny(max_num_seqs=2), requests)


def test_together(tiny: Tiny, requests: list[Request], expected: list[Answer]) -> None:
    assert answers(tiny(), requests) == expected
    assert answers(tiny(block_size=16), requests[::-1]) == expected[::-1]


@pytest.mark.parametrize("budget", [7, 33])
def test_prompts_in_chunks(tiny: Tiny, requests: list[Request], expected: list[Answer], budget: int) -> None:
    llm = tiny(max_num_seqs=budget // 2, max_num_batched_tokens=budget)
    assert answers(llm, requests) == expected


def test_preempted_and_recomputed(tiny: Tiny, requests: list[Request], expected: list[Answer]) -> None:
    llm = tiny(num_blocks=240, block_size=1)
    assert answers(llm, requests) == expected
    assert llm._engine.stats().preemptions > 3


def test_prefix_cache(tiny: Tiny, requests: list[Request], expected: list[Answer]) -> None:
    llm = tiny(enable_prefix_caching=True)
    assert answers(llm, requests) == expected
    before = llm._engine.stats().prefix_hit_tokens
    assert before > 0
    assert answers(llm, requests) == expected
    assert llm._engine.stats().prefix_hit_tokens > before + 300


@pytest.fixture
def two_threads(threads: None) -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_two_threads(tiny: Tiny, requests: list[Request], two_threads: None) -> None:
    requests = requests[2:7]
    llm = tiny(max_num_seqs=8, max_num_batched_tokens=50)
    assert answers(llm, requests) == alone(tiny(), requests)


def test_a_pool_computes_in_one_mode(tiny: Tiny) -> None:
    """Workers whose digests differ refuse to serve one pool."""
    digests = [tiny(deterministic=mode, num_blocks=4)._info.digest for mode in (True, False)]
    load_native(1)
    digests += [tiny(cpu_kernels=kernels, num_blocks=4)._info.digest for kernels in ("torch", "native")]
    assert len(set(digests)) == 3


# The real model


@pytest.mark.model
@pytest.mark.parametrize("model_dtype", DTYPES)
def test_real_model(model_dtype: str, kernels: str) -> None:
    """Together in chunks, preempted, and from the prefix cache, as alone."""
    requests = mixed([3, 60, 90, 24, 70], 49152, 12, 40)

    def load(**options: Any) -> LLM:
        return LLM(MODEL, dtype=model_dtype, max_model_len=256, deterministic=True, cpu_kernels=kernels, **options)  # type: ignore[arg-type]

    expected = alone(load(enable_prefix_caching=False), requests)
    llm = load(num_blocks=180, block_size=1, max_num_seqs=16, max_num_batched_tokens=51)
    assert answers(llm, requests) == expected
    assert answers(llm, requests) == expected
    stats = llm._engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
