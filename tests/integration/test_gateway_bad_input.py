"""Bad input over HTTP: a 400 that names the client's field, and nothing is queued. Edges that are good are queued."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.gateway_harness import Gateway, chat, completion, serve
from tests.unit.gateway import support

CONTEXT, VOCAB = 512, 400


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[Gateway]:
    async with serve(valkey_url) as g:
        yield g


async def refused(gateway: Gateway, path: str, body: bytes, param: str | None) -> dict[str, Any]:
    """The error: of OpenAI's form, about this field, with nothing queued."""
    response = await gateway.http.post(path, content=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    if param is not None:
        assert error["message"].startswith(param.removeprefix("body.").split("[")[0])
    assert await gateway.worker.queued() == 0
    assert gateway.services.metrics.registry.get_sample_value(
        "ropeway_gateway_jobs_total", {"model": support.MODEL, "outcome": "accepted"}
    ) is None  # fmt: skip
    return error


#: Of either endpoint: what is sent and the field that is at fault.
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 10**400}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB): 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"allowed_token_ids": [5, VOCAB]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [2**40]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 2, "temperature": 1e-9}, "n"),
    ({"n": 0}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
    ({"response_format": {"json_schema": {"schema": {"maximum": 10**20}}}}, "response_format"),
    ({"tools": [{"type": "function"}], "max_tokens": 3}, "tools"),
]


@pytest.mark.parametrize(("more", "param"), BAD_FIELDS)
async def test_a_bad_field_is_named_and_nothing_is_queued(gateway: Gateway, more: dict[str, Any], param: str) -> None:
    await refused(gateway, "/v1/chat/completions", json.dumps(chat(**more)).encode(), param)
    await refused(gateway, "/v1/chat/completions", json.dumps(chat(stream=True, **more)).encode(), param)
    await refused(gateway, "/v1/completions", json.dumps(completion(**more)).encode(), param)
    order = {"kind": "completion", "body": completion(**more)}
    await refused(gateway, "/v1/jobs", json.dumps(order).encode(), f"body.{param}")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens",
     "seed", "n", "top_k", "prompt_logprobs"],
)  # fmt: skip
async def test_numbers_that_json_does_not_have(gateway: Gateway, field: str, number: str) -> None:
    for path, body in (("/v1/chat/completions", chat(**{field: 77})), ("/v1/completions", completion(**{field: 77}))):
        data = json.dumps(body).replace("77", number).encode()
        assert number.encode() in data
        await refused(gateway, path, data, field)
    data = json.dumps(chat(logit_bias={"5": 77})).replace("77", number).encode()
    await refused(gateway, "/v1/chat/completions", data, "logit_bias")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [[5], []], [[5, 7], [1e19]], [-1], [VOCAB], [2**63], [[5, 7], [VOCAB]], [5, "a"], ["a", [5]], [True],
     [5.0], [None], {"a": 1}, 5, None],
)  # fmt: skip
async def test_a_prompt_that_is_none(gateway: Gateway, prompt: Any) -> None:
    await refused(gateway, "/v1/completions", json.dumps(completion(prompt)).encode(), "prompt")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
         "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
    ],
)  # fmt: skip
async def test_messages_that_are_none(gateway: Gateway, messages: Any, param: str) -> None:
    await refused(
        gateway, "/v1/chat/completions", json.dumps({"model": support.MODEL, "messages": messages}).encode(), param
    )


@pytest.mark.parametrize(
    ("prompt", "more", "param"),
    [
        (1, {"max_tokens": CONTEXT}, "max_tokens"),
        (CONTEXT - 1, {"max_tokens": 2}, "max_tokens"),
        (CONTEXT, {"max_tokens": 1}, "prompt"),
        (CONTEXT, {}, "prompt"),
        (CONTEXT + 1, {"max_tokens": 1}, "prompt"),
    ],
)
async def test_lengths_that_do_not_fit_are_told_with_true_numbers(
    gateway: Gateway, prompt: int, more: dict[str, Any], param: str
) -> None:
    error = await refused(gateway, "/v1/completions", json.dumps(completion([5] * prompt, **more)).encode(), param)
    assert error["code"] == "context_length_exceeded"
    assert str(prompt) in error["message"] and str(CONTEXT) in error["message"]


async def test_of_two_limits_the_newer_name_wins_and_is_named(gateway: Gateway) -> None:
    body = json.dumps(chat(max_tokens=5, max_completion_tokens=CONTEXT)).encode()
    error = await refused(gateway, "/v1/chat/completions", body, "max_completion_tokens")
    assert error["code"] == "context_length_exceeded"


GOOD: list[dict[str, Any]] = [
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"seed": 0},
    {"stop": " "},
    {"stop": [" ", "\n"]},
    {"temperature": 1e-300},
    {"top_p": 1e-9},
    {"top_k": VOCAB + 1},
    {"min_p": 1},
    {"logit_bias": {str(VOCAB - 1): -100}},
    {"allowed_token_ids": [0, VOCAB - 1]},
    {"truncate_prompt_tokens": -1},
    {"skip_reading_prefix_cache": True},
    {"n": 2, "temperature": 1e-5},
]


@pytest.mark.parametrize("more", GOOD)
async def test_the_edges_themselves_are_served(gateway: Gateway, more: dict[str, Any]) -> None:
    for path, body in (("/v1/chat/completions", chat(**more)), ("/v1/completions", completion(**more))):
        asked = asyncio.create_task(gateway.http.post(path, json=body))
        job = await gateway.worker.pull()
        sampling = job.job.envelope.sampling
        for name, value in more.items():
            if name in ("logit_bias", "truncate_prompt_tokens"):
                continue
            assert getattr(sampling, name) == ([value] if name == "stop" and isinstance(value, str) else value)
        await job.finish("stop")
        assert (await asked).status_code == 200


async def test_a_prompt_of_the_whole_context_less_one_is_served(gateway: Gateway) -> None:
    for more in ({"max_tokens": 1}, {}):
        asked = asyncio.create_task(gateway.http.post("/v1/completions", json=completion([5] * (CONTEXT - 1), **more)))
        job = await gateway.worker.pull()
        assert job.job.envelope.sampling.max_tokens == 1
        await job.answer("x", finish="length")
        assert (await asked).json()["choices"][0]["finish_reason"] == "length"


async def test_what_is_too_long_is_cut_where_the_client_says_so(gateway: Gateway) -> None:
    prompt = [at % VOCAB for at in range(2000)]
    for keep, most, kept in ((-1, 12, CONTEXT - 12), (-1, None, CONTEXT - 1), (7, None, 7)):
        body = completion(prompt, truncate_prompt_tokens=keep) | ({} if most is None else {"max_tokens": most})
        asked = asyncio.create_task(gateway.http.post("/v1/completions", json=body))
        job = await gateway.worker.pull()
        assert job.job.envelope.prompt_token_ids == prompt[-kept:]
        assert job.job.envelope.sampling.truncate_prompt_tokens is None
        await job.answer("x")
        assert (await asked).status_code == 200


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         "<|im_start|>user\na\nb<|im_end|>"),
        ([{"role": "system", "content": [{"type": "text", "text": "s"}]}, {"role": "user", "content": "a"}],
         "<|im_start|>system\ns<|im_end|>"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
         "<|im_start|>assistant\n<|im_end|>"),
        ([{"role": "system", "content": ""}, {"role": "user", "content": "a"}], "<|im_start|>system\n<|im_end|>"),
        ([{"role": "user", "content": "a"},
          {"role": "assistant", "content": None,
           "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
          {"role": "tool", "tool_call_id": "1", "content": "r"}], "<|im_start|>assistant\n<|im_end|>"),
    ],
)  # fmt: skip
async def test_messages_of_every_form_are_text_in_the_prompt(gateway: Gateway, messages: Any, shown: str) -> None:
    body = {"model": support.MODEL, "messages": messages}
    asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
    job = await gateway.worker.pull()
    prompt = gateway.services.catalogue.pools[0].encoder.decode(job.job.envelope.prompt_token_ids)
    assert shown in prompt and "None" not in prompt and "[{" not in prompt
    await job.answer("x")
    assert (await asked).status_code == 200


async def test_other_streams_go_on_beside_bad_requests(gateway: Gateway) -> None:
    request = gateway.http.build_request("POST", "/v1/chat/completions", json=chat(stream=True))
    opened = asyncio.create_task(gateway.http.send(request, stream=True))
    job = await gateway.worker.pull()
    await job.say("one ")
    response = await opened
    for more, _ in BAD_FIELDS:
        assert (await gateway.http.post("/v1/chat/completions", json=chat(**more))).status_code == 400
    await job.say("two")
    await job.finish("stop")
    text = (await response.aread()).decode()
    assert '"content":"one "' in text and '"content":"two"' in text
    assert text.count("[DONE]") == 1 and "error" not in text
