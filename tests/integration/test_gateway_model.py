"""A small real model behind gateway, queue and worker: what only a sampler can show, over HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stack import Stack
from tests.support.tiny_llama import VOCAB, save_tiny_model

MODEL = "tiny"
EOS = 2
PROMPT = [5, 6, 11, 40, 7]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("model") / MODEL
    save_tiny_model(folder)
    with Stack(
        model=str(folder), pool=MODEL, dtype="float32", threads=1, block_size=4, num_blocks=64,
        cache_dir=str(folder / "cache"), lanes=1, clean=True,
    ) as stack:  # fmt: skip
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        with httpx.Client(base_url=stack.url, timeout=120) as client:
            yield client


def complete(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The answer to a completion."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, **more}
    answer: dict[str, Any] = http.post("/v1/completions", json=body).raise_for_status().json()
    return answer


def text(http: httpx.Client, **more: Any) -> str:
    """Of its only choice."""
    (choice,) = complete(http, **more)["choices"]
    return str(choice["text"])


def test_no_end_before_min_tokens_however_much_it_is_wanted(http: httpx.Client) -> None:
    for more in ({}, {"temperature": 0}, {"stop_token_ids": [7], "logit_bias": {str(EOS): 100, "7": 100}}):
        answer = complete(
            http, **{"logit_bias": {str(EOS): 100}, "min_tokens": 4, "max_tokens": 10, "ignore_eos": False, **more}
        )
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 5
        assert len(answer["choices"][0]["text"].split()) == 4


@pytest.mark.parametrize(
    "narrow",
    [{"allowed_token_ids": [5]}, {"top_k": 1}, {"logit_bias": {str(i): -100 for i in range(VOCAB) if i != 5}},
     {"temperature": 0}, {"top_p": 1e-9}],
)  # fmt: skip
def test_more_log_probabilities_than_tokens_that_may_come_are_finite(
    http: httpx.Client, narrow: dict[str, Any]
) -> None:
    answer = complete(http, logprobs=20, max_tokens=3, **narrow)
    found = answer["choices"][0]["logprobs"]
    assert [len(top) >= 20 for top in found["top_logprobs"]] == [True] * 3
    values = [*found["token_logprobs"], *(value for top in found["top_logprobs"] for value in top.values())]
    assert all(math.isfinite(value) and value <= 0 for value in values)


def test_log_probabilities_of_a_prompt_are_those_of_the_same_tokens_generated(http: httpx.Client) -> None:
    """Greedy tokens behind a prompt, and the same tokens as the end of a longer prompt."""
    most = 5
    answer = complete(http, temperature=0, logprobs=most, max_tokens=20)
    told = answer["choices"][0]["logprobs"]
    ids = [int(token.strip()[1:]) for token in told["tokens"]]
    longer = complete(http, prompt=[*PROMPT, *ids], prompt_logprobs=most, echo=True, logprobs=most, max_tokens=1)
    (choice,) = longer["choices"]
    echoed = {name: values[len(PROMPT) : -1] for name, values in choice["logprobs"].items()}
    assert echoed["token_logprobs"] == pytest.approx(told["token_logprobs"], abs=1e-3)
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    table = choice["prompt_logprobs"][len(PROMPT) :]
    for token, logprob, candidates, top in zip(ids, told["token_logprobs"], table, told["top_logprobs"], strict=True):
        assert candidates[str(token)]["rank"] == 1
        assert candidates[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-3)
        assert {entry["decoded_token"].strip() for entry in candidates.values()} == {name.strip() for name in top}


@pytest.mark.parametrize("sampling", [{"seed": 42}, {"temperature": 0}, {"seed": -(2**63)}, {"seed": 2**63 - 1}])
def test_an_answer_depends_on_its_request_alone(http: httpx.Client, sampling: dict[str, Any]) -> None:
    alone = text(http, **sampling)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(text, http, prompt=[at % VOCAB, 9, 3 + at]) for at in range(3, 9)]
        beside = [pool.submit(text, http, **sampling) for _ in range(2)]
        assert [future.result() for future in beside] == [alone, alone]
        assert all(future.result() for future in others)
    if "seed" in sampling:
        assert text(http, seed=43) != alone


@pytest.mark.parametrize("sampling", [{"seed": 42}, {"temperature": 0}])
def test_a_preemption_changes_no_text(http: httpx.Client, sampling: dict[str, Any]) -> None:
    ask = {"max_tokens": 200, "logprobs": 2, **sampling}
    undisturbed = complete(http, **ask)
    body = {"model": MODEL, "prompt": PROMPT, "ignore_eos": True, **ask}
    urgent = {"prompt": [at % VOCAB for at in range(248)], "max_tokens": 2, "service_tier": "priority"}
    for _ in range(20):
        job = http.post("/v1/jobs", json={"kind": "completion", "body": body}).raise_for_status().json()["id"]
        _wait_for_tokens(http, job, 5)
        complete(http, **urgent)
        done = http.get(f"/v1/jobs/{job}", params={"wait": 60}).json()
        assert_same(done["result"], undisturbed)
        if done["timings"]["preemptions"]:
            return
    raise AssertionError("it was never preempted")


def assert_same(answer: dict[str, Any], other: dict[str, Any]) -> None:
    """Text, finish and usage to the letter; log probabilities but for the last bits, which recomputing may change."""
    (one,), (two,) = answer["choices"], other["choices"]
    assert (one["text"], one["finish_reason"]) == (two["text"], two["finish_reason"])
    for name in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][name] == other["usage"][name]
    assert one["logprobs"]["tokens"] == two["logprobs"]["tokens"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(two["logprobs"]["token_logprobs"], abs=1e-3)
    for top, expected in zip(one["logprobs"]["top_logprobs"], two["logprobs"]["top_logprobs"], strict=True):
        assert top == pytest.approx(expected, abs=1e-3)


def _wait_for_tokens(http: httpx.Client, job: str, count: int) -> None:
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        seen = 0
        for line in response.iter_lines():
            if line.startswith("data:"):
                seen += sum(len(choice["token_ids"]) for choice in json.loads(line[5:])["choices"])
            if seen >= count:
                return


def test_options_that_leave_no_token_are_that_requests_400(http: httpx.Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(text, http, seed=1)
        body = {"model": MODEL, "prompt": PROMPT, "allowed_token_ids": [EOS], "min_tokens": 2}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
        assert good.result()
