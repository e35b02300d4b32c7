"""The real model through gateway, Redis and a worker, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
import redis

from tests.support.direct_redis import DirectRedis
from tests.support.stack import Stack

MODEL = "smollm2-135m-instruct"
pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(clean=True, model=MODEL, dtype="float32", max_num_seqs=64, kv_cache_memory_mb=1024) as s:
        s.start_gateway()
        _, s.health_port = s.start_worker()  # type: ignore[attr-defined]
        s.wait_ready()
        yield s


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as c:
        yield c


def test_chat_stream_equals_chat(client: openai.OpenAI) -> None:
    ask = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three kinds of ropeway."}],
        "max_tokens": 40,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(
            **ask,
            stream=True,  # type: ignore[call-overload]
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_service_in_node_without_the_gateway(
    stack: Stack, client: openai.OpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    question = "What is a ropeway? \u00c9 \U0001f6a1"
    direct = DirectRedis(tmp_path_factory.mktemp("direct"))
    ask = ("--max-tokens", "24", "--temperature", "0")
    text, said = direct.run(stack.redis.url, question, *ask, "--miss-after", "4")
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
    )
    assert text == answer.choices[0].message.content and text.strip()
    assert answer.usage is not None and said["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
    assert said["read"]["log"] >= 5 and sum(said["read"].values()) == said["frames"]


def test_completions_take_a_list_of_prompts(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "Water boils at", "def add(a, b):"]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0)
    assert [c.index for c in together.choices] == [0, 1, 2]
    for choice, prompt in zip(together.choices, prompts, strict=True):
        alone = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        assert choice.text == alone.choices[0].text


def test_a_prompt_longer_than_the_context_is_refused_with_true_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt=[5] * 9000, max_tokens=8)
    assert error.value.code == "context_length_exceeded"
    assert "9000" in error.value.message
    assert "8192" in error.value.message


def test_events_resume_in_mid_stream(stack: Stack) -> None:
    body = {
        "kind": "completion",
        "body": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True},
    }
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        job = http.post("/v1/jobs", json=body).raise_for_status().json()["id"]
        first = read_events(http, job, None, most=5)
        rest = read_events(http, job, first[-1][0], most=None)
        whole = read_events(http, job, None, most=None)
    assert first + rest == whole
    ids = [i for i, _ in whole]
    assert ids == list(range(1, len(ids) + 1))
    assert whole[-1][1]["kind"] == "done"
    tokens = [t for _, e in whole for c in e.get("choices", []) for t in c.get("token_ids", [])]
    assert len(tokens) == 60


def read_events(http: httpx.Client, job: str, last_id: int | None, most: int | None) -> list[tuple[int, dict]]:  # type: ignore[type-arg]
    """Events of a job after `last_id`; hangs up after `most`."""
    headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
    events: list[tuple[int, dict]] = []  # type: ignore[type-arg]
    with http.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as response:
        response.raise_for_status()
        number = 0
        for line in response.iter_lines():
            if line.startswith("id:"):
                number = int(line[3:])
            elif line.startswith("data:") and line[5:].strip() != "[DONE]":
                events.append((number, json.loads(line[5:])))
                if most is not None and len(events) == most:
                    break
    return events


async def test_64_streams_each_equal_to_their_offline_text(stack: Stack) -> None:
    topics = ["rivers", "steel", "bread", "clouds", "chess", "bees", "tides", "glass"]
    prompts = [f"Tell me {'a lot ' * (i % 5)}about {topics[i % 8]}, part {i}:" for i in range(64)]
    lengths = [8 + (i * 7) % 57 for i in range(64)]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=300) as client:

        async def one(prompt: str, length: int) -> tuple[str, str | None]:
            text, finish = "", None
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=length, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text
                finish = chunk.choices[0].finish_reason or finish
            return text, finish

        streamed = await asyncio.gather(*(one(p, n) for p, n in zip(prompts, lengths, strict=True)))
    offline = await asyncio.to_thread(offline_texts, prompts, lengths)
    assert streamed == offline
    assert_clean(stack)


def offline_texts(prompts: list[str], lengths: list[int]) -> list[tuple[str, str | None]]:
    """The same prompts through `LLM.generate` in this process."""
    from ropeway import LLM, SamplingParams

    llm = LLM(model=MODEL, dtype="float32", max_num_seqs=16)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def assert_clean(stack: Stack) -> None:
    """All blocks are free, nothing is queued or pending, and every key of a job has an expiry."""
    metrics = httpx.get(f"http://127.0.0.1:{stack.health_port}/metrics").text  # type: ignore[attr-defined]
    values = {
        line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line and not line.startswith("#")
    }
    assert values["ropeway_num_requests_running"] == 0
    assert values["ropeway_kv_cache_usage_perc"] == 0
    with redis.Redis(port=stack.redis.port) as client:
        for key in client.scan_iter(count=1000):
            kind = client.type(key)
            if b":job:" in key or b":ev:" in key:
                assert client.pttl(key) > 0, key
            elif kind == b"stream":
                assert client.xlen(key) == 0, key
