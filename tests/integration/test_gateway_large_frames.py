"""The largest answers that are allowed, through a Redis that cuts off subscribers who let too much pile up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admission import MAX_PROMPT_CANDIDATES
from tests.support.redis_server import binary
from tests.support.stack import Stack

MODEL = "sim"
CANDIDATES = 20
PROMPT = MAX_PROMPT_CANDIDATES // (1 + CANDIDATES)


@pytest.fixture(params=["redis-as-it-comes", "redis-strict"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """`strict`: more than 1 MB of unread messages ends a subscriber's connection; as it comes, that is 32 MB."""
    kind, _, strict = request.param.partition("-")
    if binary(kind) is None:
        pytest.skip(f"no {kind} server installed")
    # All of a prompt in one step.
    worker = {"max_num_batched_tokens": 16_384, "max_model_len": 16_500, "max_num_seqs": 16, "sim_step_ms": 0}
    with Stack(redis_kind=kind, clean=True, engine="sim", pool=MODEL, **worker) as s:
        with s.redis.client() as client:
            assert "pubsub 33554432 8388608 60" in client.config_get("client-output-buffer-limit").popitem()[1]
            if strict == "strict":
                client.config_set("client-output-buffer-limit", "pubsub 1mb 0 0")
        s.start_gateway()
        s.start_worker()
        s.wait_ready()
        yield s


def body(number: int, **more: Any) -> dict[str, Any]:
    prompt = [10 + (number + at) % 300 for at in range(PROMPT)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 3, "seed": 1, "prompt_logprobs": CANDIDATES, **more}


async def whole(http: httpx.AsyncClient, number: int) -> list[Any]:
    response = await http.post("/v1/completions", json=body(number))
    return list(response.raise_for_status().json()["choices"][0]["prompt_logprobs"])


async def streamed(http: httpx.AsyncClient, number: int) -> list[Any]:
    job = (await http.post("/v1/jobs", json={"kind": "completion", "body": body(number)})).raise_for_status().json()
    told: list[Any] = [None]
    tokens, numbers = 0, []
    async with http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
        async for line in response.aiter_lines():
            if line.startswith("id:"):
                numbers.append(int(line[3:]))
            elif line.startswith("data:") and line[5:].strip() != "[DONE]":
                event = json.loads(line[5:])
                told += event.get("prompt_logprobs", [])
                tokens += sum(len(choice.get("token_ids", [])) for choice in event.get("choices", []))
    assert numbers == list(range(1, len(numbers) + 1))
    assert tokens == 3
    return told


async def test_nobody_is_cut_off_and_nothing_is_missing(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as http:
        small = {"model": MODEL, "prompt": "beside", "max_tokens": 200, "ignore_eos": True}
        beside = asyncio.create_task(http.post("/v1/completions", json=small))
        asked = [streamed(http, 0), whole(http, 0), whole(http, 1)]
        answers = await asyncio.gather(*asked)
        for answer in answers:
            assert len(answer) == PROMPT
            assert all(len(entry) >= CANDIDATES for entry in answer[1:])
        assert answers[0] == answers[1] != answers[2]
        assert (await beside).json()["usage"]["completion_tokens"] == 200
        metrics = text_string_to_metric_families((await http.get("/metrics")).text)
        name = "ropeway_gateway_pubsub_reconnects_total"
        assert [s.value for family in metrics for s in family.samples if s.name == name] == [0]
