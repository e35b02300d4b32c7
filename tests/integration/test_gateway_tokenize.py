"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.gateway_harness import Gateway, chat, serve
from tests.unit.gateway import support


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[Gateway]:
    async with serve(valkey_url) as g:
        yield g


async def post(g: Gateway, path: str, **body: Any) -> dict[str, Any]:
    response = await g.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def test_there_and_back(gateway: Gateway) -> None:
    got = await post(
        gateway, "/tokenize", model=support.MODEL, prompt="hello, w\u00f6rld \U0001f600", return_token_strs=True
    )
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    assert got["max_model_len"] == support.card().max_model_len
    back = await post(gateway, "/detokenize", model=support.MODEL, tokens=got["tokens"])
    assert back == {"prompt": "hello, w\u00f6rld \U0001f600"}
    assert (await post(gateway, "/tokenize", prompt="x"))["token_strs"] is None
    assert (await post(gateway, "/tokenize", prompt=""))["count"] == 0
    assert await post(gateway, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_a_conversation_has_the_tokens_of_its_job(gateway: Gateway) -> None:
    messages = chat("how many tokens am I?")["messages"]
    got = await post(gateway, "/tokenize", model=support.MODEL, messages=messages)
    await gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat("how many tokens am I?")})
    assert (await gateway.worker.pull()).job.envelope.prompt_token_ids == got["tokens"]
    shorter = await post(gateway, "/tokenize", messages=messages, add_generation_prompt=False)
    assert shorter["tokens"] == got["tokens"][: shorter["count"]] and shorter["count"] < got["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": 5}, "model"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        (
            "/tokenize",
            {"messages": chat()["messages"], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**19]}, "tokens"),
        ("/detokenize", {"tokens": [support.card().vocab_size]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(gateway: Gateway, path: str, body: dict[str, Any], param: str) -> None:
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "").startswith(param)


async def test_an_unknown_model_is_a_404(gateway: Gateway) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        response = await gateway.http.post(path, json={"model": "other", **body})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
