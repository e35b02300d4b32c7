"""Answers that are not streamed, models, and the `openai` client, over a real Redis of each kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tests.integration.gateway_harness import Gateway, chat, completion, serve
from tests.unit.gateway import support

pytestmark = pytest.mark.topologies


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
    assert job.job.envelope.flush_ms == gateway.services.settings.flush_ms
    await job.answer("Hel", "lo", finish="length")
    answer = await asked
    assert answer.id == f"chatcmpl-{job.id}"
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    prompt = len(job.job.envelope.prompt_token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 2)
    assert answer.usage.total_tokens == prompt + 2
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_a_chat_streams(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    asked = asyncio.create_task(
        client.chat.completions.create(**chat("hi", stream=True, stream_options={"include_usage": True}))
    )
    job = await gateway.worker.pull()
    assert job.job.envelope.flush_ms == 0
    await job.answer("Hel", "lo")
    chunks = [chunk async for chunk in await asked]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_a_list_of_prompts_is_answered_in_order(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    prompts = ["never", "stops", "cable"]
    asked = asyncio.create_task(client.completions.create(**completion(prompts)))
    jobs = [await gateway.worker.pull() for _ in prompts]
    for job in reversed(jobs):
        text = gateway.services.catalogue.pools[0].encoder.decode(job.job.envelope.prompt_token_ids)
        await job.answer(text.upper())
    answer = await asked
    assert [c.text for c in answer.choices] == ["NEVER", "STOPS", "CABLE"]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_choices_have_their_indexes(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    asked = asyncio.create_task(client.chat.completions.create(**chat(n=3)))
    job = await gateway.worker.pull()
    for index in (2, 0, 1):
        await job.say(f"t{index}", index=index)
    await job.finish("stop")
    assert [c.message.content for c in (await asked).choices] == ["t0", "t1", "t2"]


async def test_models_are_listed(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [m.id for m in models] == [support.MODEL]
    assert (await client.models.retrieve(support.MODEL)).id == support.MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


async def test_an_unknown_model_is_a_404(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    for model in ("nobody", "../../etc", "a/b", "tiny\x00", "tiny ", "{tiny}"):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(**chat() | {"model": model})
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"


async def test_a_pool_that_joins_later_is_found(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(**completion() | {"model": "late"})
    await gateway.store.put_card(support.card(pool="late"), support.bundle())
    async with asyncio.timeout(10):  # an unknown name makes the catalogue look again, a bounded number of times
        while "late" not in [m.id for m in (await client.models.list()).data]:
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("not-this-one-either")
            await asyncio.sleep(0.05)


async def test_usage_of_a_cancelled_job_is_the_engines(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    asked = asyncio.create_task(client.chat.completions.create(**chat()))
    job = await gateway.worker.pull()
    await job.say("half")
    assert await gateway.store.cancel(job.id) == "running"
    await job.finish("abort", status="cancelled")
    answer = await asked
    assert answer.choices[0].message.content == "half"
    assert answer.choices[0].finish_reason == "abort"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


async def test_a_job_cancelled_while_it_is_queued_ends_its_request(gateway: Gateway) -> None:
    asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=chat(stream=True)))
    job_id = await only_job(gateway)
    assert await gateway.store.cancel(job_id) == "cancelled"
    text = (await asked).text
    assert text.count('"finish_reason":"abort"') == 1
    assert text.count("[DONE]") == 1


async def only_job(gateway: Gateway) -> str:
    """The id of the one job that the hub follows."""
    async with asyncio.timeout(10):
        while not await gateway.worker.queued():
            await asyncio.sleep(0.005)
    (follower,) = gateway.services.hub.followers
    return follower.tracks[0].job_id
