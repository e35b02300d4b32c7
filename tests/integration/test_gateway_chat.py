"""Chat and completions through a real gateway and a real Redis, a worker played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tests.integration.gateway_harness import Gateway, chat, completion, events, serve
from tests.unit.gateway import support


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with serve(redis_url) as g:
        yield g


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as c:
        yield c


async def test_a_chat_is_answered(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    asked = asyncio.create_task(client.chat.completions.create(**chat("hi", max_tokens=5)))
    job = await gateway.worker.pull()
    await job.answer("Hel", "lo", finish="length")
    answer = await asked
    assert answer.id == f"chatcmpl-{job.id}"
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    prompt = len(job.job.envelope.prompt_token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        prompt, 2, prompt + 2,
    )  # fmt: skip
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
