"""Log probabilities of prompts over HTTP: gateway, queue, a worker with the simulated engine, the `openai` client."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from engine.sim_model import PromptSource, SimVocabulary
from tests.support.stack import Stack

MODEL = "sim"
VOCABULARY = SimVocabulary()
TEXT = "The cable café 😀 moves gently"
IDS = VOCABULARY.tokenizer.encode(TEXT).ids


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(clean=True, engine="sim", pool=MODEL, sim_step_ms=1, max_num_batched_tokens=64) as s:
        s.start_gateway()
        s.start_worker()
        s.wait_ready()
        yield s


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as c:
        yield c


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as c:
        yield c


def expected(ids: list[int], count: int) -> list[Any]:
    """What an answer says of a prompt: nothing of its first token, of every other the token and its candidates."""
    source, table = PromptSource(VOCABULARY, ids, None, count), [None]
    for entry in map(source.logprob, range(len(ids) - 1)):
        shown = {str(entry.token_id): (entry.logprob, entry.rank, entry.token)}
        shown |= {str(token): (logprob, rank, raw) for token, logprob, rank, raw in entry.top}
        table.append({
            token: {"logprob": pytest.approx(logprob), "rank": rank, "decoded_token": raw.decode("utf-8", "replace")}
            for token, (logprob, rank, raw) in shown.items()
        })  # fmt: skip
    return table


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=2, extra_body={"prompt_logprobs": 2})
    table = answer.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert table == expected(IDS, 2)
    assert table[0] is None and len(table) == len(IDS)
    assert all(str(token) in entry and 2 <= len(entry) <= 3 for token, entry in zip(IDS[1:], table[1:], strict=True))
    assert answer.usage is not None and answer.usage.prompt_tokens == len(IDS)


def test_of_several_prompts_and_choices_each_has_its_own(client: openai.OpenAI) -> None:
    prompts = [IDS, VOCABULARY.tokenizer.encode("rope").ids, [17]]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, extra_body={"prompt_logprobs": 0})
    tables = [choice.prompt_logprobs for choice in answer.choices]  # type: ignore[attr-defined]
    assert tables == [expected(ids, 0) for ids in prompts for _ in range(2)]
    assert tables[-1] == [None]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2, max_tokens=2, extra_body={"prompt_logprobs": 3}
    )
    ids = VOCABULARY.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").ids
    assert answer.prompt_logprobs == expected(ids, 3)  # type: ignore[attr-defined]
    assert not any(hasattr(choice, "prompt_logprobs") for choice in answer.choices)


@pytest.mark.parametrize("prompt", [TEXT, IDS])
@pytest.mark.parametrize("most", [0, 3])
def test_an_echo_with_logprobs_as_evaluations_ask_for_it(client: openai.OpenAI, prompt: Any, most: int) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[prompt], echo=True, logprobs=most, max_tokens=1, temperature=0, seed=1234
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.text.startswith(TEXT)
    tokens, values = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    tops, places = choice.logprobs.top_logprobs or [], choice.logprobs.text_offset or []
    assert len(tokens) == len(values) == len(tops) == len(places) == len(IDS) + 1
    assert values[0] is None and tops[0] is None  # type: ignore[comparison-overlap]
    source = PromptSource(VOCABULARY, IDS, None, most)
    assert values[1:-1] == pytest.approx([source.logprob(at).logprob for at in range(len(IDS) - 1)])
    for token, value, top in list(zip(tokens, values, tops, strict=True))[1:]:
        assert token in top and len(top) <= most + 1
        assert max(top.values()) >= value
    for token, place in zip(tokens, places, strict=True):
        assert choice.text[place:].startswith(token) or choice.text[place] in "é😀"
    assert not hasattr(choice, "prompt_logprobs")
    assert answer.usage is not None and answer.usage.completion_tokens == 1


def test_an_echo_of_nothing_but_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXT, echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == TEXT and choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []).startswith("The cable") and len(choice.logprobs.tokens or []) == len(
        IDS
    )
    both = client.completions.create(
        model=MODEL, prompt=TEXT, echo=True, logprobs=1, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    assert both.choices[0].prompt_logprobs == expected(IDS, 2)  # type: ignore[attr-defined]
    assert both.choices[0].logprobs is not None and len(both.choices[0].logprobs.tokens or []) == len(IDS) + 1


def test_a_job_has_them_in_its_events_and_in_its_result(http: httpx.Client) -> None:
    ids = IDS * 12
    body = {"model": MODEL, "prompt": ids, "max_tokens": 5, "prompt_logprobs": 2}
    job = http.post("/v1/jobs", json={"kind": "completion", "body": body}).raise_for_status().json()["id"]
    done = http.get(f"/v1/jobs/{job}", params={"wait": 60}).json()
    assert done["result"]["choices"][0]["prompt_logprobs"] == expected(ids, 2)
    events = [
        json.loads(line[5:]) for line in http.get(f"/v1/jobs/{job}/events").text.split("\n") if line.startswith("data:")
    ]
    told = [entry for event in events for entry in event.get("prompt_logprobs", [])]
    assert [None, *told] == expected(ids, 2)
    kinds = ["prompt" if "prompt_logprobs" in event else "tokens" for event in events if event["kind"] == "tokens"]
    assert kinds[0] == "prompt" and kinds == sorted(kinds)


def test_a_large_answer(http: httpx.Client) -> None:
    ids = (IDS * 400)[:3000]
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 20}
    response = http.post("/v1/completions", json=body).raise_for_status()
    assert len(response.content) > 1_000_000
    assert response.json()["choices"][0]["prompt_logprobs"] == expected(ids, 20)
    job = response.headers["x-ropeway-job-id"]
    stored = http.get(f"/v1/jobs/{job}").json()
    assert stored["result"]["choices"] == response.json()["choices"]


def test_without_being_asked_for_they_are_absent(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": TEXT, "logprobs": 2}),
        ("/v1/completions", {"prompt": TEXT, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
    ):
        response = http.post(path, json={"model": MODEL, "max_tokens": 2, **body}).raise_for_status()
        assert "prompt_logprobs" not in response.text


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": "2"}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "n": 128, "prompt": IDS * 40, "max_tokens": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 20, "n": 128, "prompt": IDS * 40, "max_tokens": 1}, "echo"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "prompt": TEXT, **more}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    if not more.get("echo"):
        response = http.post("/v1/jobs", json={"kind": "completion", "body": body})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"body.{param}"


def test_numbers_are_finite(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": TEXT, "prompt_logprobs": 20, "echo": True, "logprobs": 20, "max_tokens": 3}
    text = http.post("/v1/completions", json=body).raise_for_status().text

    def refuse(name: str) -> float:
        raise AssertionError(name)

    values = [value for value in _numbers(json.loads(text, parse_constant=refuse)) if isinstance(value, float)]
    assert values and all(math.isfinite(value) and value <= 0 for value in values)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value
