"""Streams: chunks, endings, errors, sequence numbers, usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from shared.jobs import Owned
from shared.protocol import ChoiceFrame, ErrorInfo, TokenLogprob, TopLogprob
from tests.integration.gateway_harness import Event, Gateway, Running, chat, completion, events, serve
from tests.unit.gateway import support


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[Gateway]:
    async with serve(valkey_url) as g:
        yield g


async def collect(gateway: Gateway, path: str, body: dict[str, Any]) -> list[Event]:
    """All events of a stream."""
    async with gateway.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        return [event async for event in events(response)]


async def streamed(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[asyncio.Task[list[Event]], Running]:
    """A stream that is being read, and its job."""
    task = asyncio.create_task(collect(gateway, path, body | {"stream": True}))
    return task, await gateway.worker.pull()


def opening(gateway: Gateway, path: str, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    """A stream's response, which comes with its first token."""
    request = gateway.http.build_request("POST", path, json=body | {"stream": True})
    return asyncio.create_task(gateway.http.send(request, stream=True))


def finishes(got: list[Event]) -> list[tuple[int, str]]:
    """Finish chunks in order: choice, reason."""
    return [(c["index"], c["finish_reason"]) for e in chunks(got) for c in e["choices"] if c["finish_reason"]]


def chunks(got: list[Event]) -> list[dict[str, Any]]:
    """Chunks without errors and the end."""
    return [e.data for e in got if e.data != "[DONE]" and "error" not in e.data]


def assert_well_ended(got: list[Event], choices: int = 1) -> None:
    """Exactly one [DONE], the last event, and one finish chunk per choice, with nothing of the choice behind it."""
    assert [e.data for e in got].count("[DONE]") == 1
    assert got[-1].data == "[DONE]"
    assert sorted(i for i, _ in finishes(got)) == list(range(choices))
    closed: set[int] = set()
    for chunk in chunks(got):
        for choice in chunk["choices"]:
            assert choice["index"] not in closed
            if choice["finish_reason"]:
                closed.add(choice["index"])


async def test_a_chat_stream_has_role_text_finish_and_usage(gateway: Gateway) -> None:
    task, job = await streamed(gateway, "/v1/chat/completions", chat(stream_options={"include_usage": True}))
    await job.answer("Hel", "", "lo")
    got = await task
    assert_well_ended(got)
    first = got[0].data
    assert first["object"] == "chat.completion.chunk"
    assert first["id"] == f"chatcmpl-{job.id}"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks(got)[:-1]) == "Hello"
    assert all(c["usage"] is None for c in chunks(got)[:-1])
    last = chunks(got)[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    # Frames: started, Hel, held back, lo, done. Numbers are on the last event of each frame that shows something.
    assert [e.id for e in got] == [None, 2, 4, 5, None, None]


async def test_without_include_usage_chunks_have_no_usage(gateway: Gateway) -> None:
    task, job = await streamed(gateway, "/v1/completions", completion())
    await job.answer("a")
    got = await task
    assert_well_ended(got)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks(got))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
async def test_every_finish_ends_once(gateway: Gateway, path: str, finish: str) -> None:
    body = chat() if "chat" in path else completion()
    task, job = await streamed(gateway, path, body)
    await job.start()
    await job.say("x")
    await job.finish(finish, status="cancelled" if finish == "abort" else "completed")
    got = await task
    assert_well_ended(got)
    assert finishes(got) == [(0, finish)]


async def test_an_empty_output_has_a_finish_chunk(gateway: Gateway) -> None:
    task, job = await streamed(gateway, "/v1/chat/completions", chat())
    await job.finish("stop")
    got = await task
    assert_well_ended(got)
    assert [c["choices"][0]["delta"] for c in chunks(got)] == [{"role": "assistant", "content": ""}, {}]


async def test_a_last_frame_that_leaves_choices_open_closes_them(gateway: Gateway) -> None:
    task, job = await streamed(gateway, "/v1/chat/completions", chat(n=2, temperature=1.0))
    await job.say("x", index=1)
    await job.finish(None, status="cancelled")
    got = await task
    assert_well_ended(got, choices=2)
    assert finishes(got) == [(0, "abort"), (1, "abort")]


async def test_an_error_before_the_first_token_has_its_status(gateway: Gateway) -> None:
    request = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=chat(stream=True)))
    job = await gateway.worker.pull()
    await job.start()
    info = ErrorInfo(message="NaN in row 3 of secret", type="server_error", code="engine_error", status=500)
    await job.finish(None, status="failed", error=info)
    response = await request
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "engine_error"
    assert job.id in error["message"]
    assert "secret" not in response.text


async def test_an_expired_job_is_a_504(gateway: Gateway) -> None:
    request = asyncio.create_task(gateway.http.post("/v1/completions", json=completion()))
    job = await gateway.worker.pull()
    info = ErrorInfo(message="its deadline passed", type="timeout_error", code="deadline_exceeded", status=504)
    await job.finish(None, status="expired", error=info)
    response = await request
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


async def test_an_error_in_mid_stream_ends_it_once(gateway: Gateway) -> None:
    opened = opening(gateway, "/v1/chat/completions", chat())
    job = await gateway.worker.pull()
    await job.say("x")
    response = await opened
    info = ErrorInfo(message="the secret reason", type="server_error", code="engine_error", status=500)
    await job.finish("error", status="failed", error=info)
    got = [event async for event in events(response)]
    assert_well_ended(got)
    assert finishes(got) == [(0, "error")]
    errors = [e.data["error"] for e in got if e.data != "[DONE]" and "error" in e.data]
    assert len(errors) == 1
    assert got.index(next(e for e in got if e.data != "[DONE]" and "error" in e.data)) == len(got) - 2
    assert errors[0]["code"] == "engine_error"
    assert "secret" not in str(got)
    assert job.id in errors[0]["message"]


async def test_the_openai_client_raises_on_an_error_in_mid_stream(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        stream_task = asyncio.create_task(client.chat.completions.create(**chat(stream=True)))
        job = await gateway.worker.pull()
        await job.say("x")
        stream = await stream_task
        await job.finish(None, status="failed", error=ErrorInfo(message="m", code="engine_error"))
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_chat_logprobs_travel_with_their_tokens(gateway: Gateway) -> None:
    task, job = await streamed(gateway, "/v1/chat/completions", chat(logprobs=True, top_logprobs=1))
    assert job.job.envelope.sampling.logprobs == 1
    entry = TokenLogprob(
        id=7,
        logprob=-0.5,
        rank=1,
        token="é".encode(),
        top=[
            TopLogprob(id=7, logprob=-0.5, rank=1, token="é".encode()),
            TopLogprob(id=8, logprob=float("-inf"), rank=2, token=b"x"),
        ],
    )
    held = TokenLogprob(id=9, logprob=float("-inf"), rank=3, token=b"\xc3", top=[])
    await job.say("é", logprobs=[entry])
    await job.say("", ids=[9], logprobs=[held])  # its text is held back; the entry goes now
    await job.say("z", ids=[7, 7], logprobs=[entry, entry])
    await job.finish("stop")
    got = await task
    assert_well_ended(got)
    content = [e for c in chunks(got) for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(content) == 4
    assert content[0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": [195, 169]}],
    }
    assert content[1]["logprob"] == -9999.0
    assert content[1]["bytes"] == [195]


async def test_completion_logprobs_have_offsets(gateway: Gateway) -> None:
    task, job = await streamed(gateway, "/v1/completions", completion(logprobs=1))
    entries = [
        TokenLogprob(id=i, logprob=-1.0, rank=1, token=t, top=[TopLogprob(id=1, logprob=-0.1, rank=1, token=b"q")])
        for i, t in ((5, b"ab"), (6, b"c"))
    ]
    await job.say("ab", ids=[5], logprobs=entries[:1])
    await job.say("c", ids=[6], logprobs=entries[1:])
    await job.finish("stop")
    found = [c["choices"][0]["logprobs"] for c in chunks(await task)]
    assert found[0] == {
        "tokens": ["ab"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"q": -0.1, "ab": -1.0}],
        "text_offset": [0],
    }
    assert found[1]["text_offset"] == [2]


async def test_several_prompts_and_choices_share_one_stream(gateway: Gateway) -> None:
    body = completion(["one", "two"], n=2, temperature=1.0, stream=True)
    task = asyncio.create_task(collect(gateway, "/v1/completions", body))
    jobs = [await gateway.worker.pull() for _ in range(2)]
    assert len({j.id for j in jobs}) == 2
    assert len({j.job.envelope.sampling.seed for j in jobs}) == 2
    for job in jobs:
        for index in range(2):
            await job.say(f"{job.id}/{index}", index=index)
        await job.finish("stop")
    got = await task
    assert_well_ended(got, choices=4)
    text: dict[int, str] = {}
    for chunk in chunks(got):
        for choice in chunk["choices"]:
            text[choice["index"]] = text.get(choice["index"], "") + choice["text"]
    first = got[0].data["id"].removeprefix("cmpl-")
    second = next(j.id for j in jobs if j.id != first)
    assert text == {0: f"{first}/0", 1: f"{first}/1", 2: f"{second}/0", 3: f"{second}/1"}
    assert all(e.id is None for e in got)


async def test_one_of_several_jobs_fails(gateway: Gateway) -> None:
    opened = opening(gateway, "/v1/completions", completion(["a", "b"]))
    one, two = [await gateway.worker.pull() for _ in range(2)]
    await one.say("x")
    response = await opened
    await two.finish(None, status="failed", error=ErrorInfo(message="m", code="engine_error"))
    got = [event async for event in events(response)]
    assert_well_ended(got, choices=2)
    assert {reason for _, reason in finishes(got)} == {"error"}
    async with asyncio.timeout(10):  # the other one goes on for nobody, so it is cancelled
        while not (await gateway.store.get(one.id)).cancel_requested:
            await asyncio.sleep(0.01)


async def test_echo_puts_the_prompt_in_front(gateway: Gateway) -> None:
    task, job = await streamed(gateway, "/v1/completions", completion("never stops", echo=True))
    await job.answer("!")
    assert "".join(c["choices"][0]["text"] for c in chunks(await task)) == "never stops!"
    whole = asyncio.create_task(
        gateway.http.post("/v1/completions", json=completion(job.job.envelope.prompt_token_ids, echo=True))
    )
    await (await gateway.worker.pull()).answer("!")
    assert (await whole).json()["choices"][0]["text"] == "never stops!"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", completion()),
        ("/v1/responses", {"model": support.MODEL, "input": "x"}),
    ],
)
async def test_headers_keep_proxies_from_buffering(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    sent = opening(gateway, path, body)
    job = await gateway.worker.pull()
    await job.answer("x")
    again = [f"/v1/jobs/{job.id}/events"]
    again += [f"/v1/responses/resp_{job.id}?stream=true"] if "responses" in path else []
    requests = [gateway.http.build_request("GET", url, headers={"Accept-Encoding": "gzip"}) for url in again]
    for response in [await sent, *[await gateway.http.send(request, stream=True) for request in requests]]:
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in response.headers
        assert response.headers["x-ropeway-job-id"] == job.id
        await response.aclose()


async def test_frames_of_a_second_attempt_go_on(gateway: Gateway) -> None:
    """Numbering goes on over attempts: what the new owner publishes is not taken for old."""
    task, job = await streamed(gateway, "/v1/completions", completion())
    await job.start()
    await job.say("a")
    assert await gateway.store.release(job.worker.owner, Owned(job.id, job.job.epoch))
    again = await gateway.worker.pull()
    assert again.id == job.id
    assert again.job.last_seq == 2
    again.seq, again.tokens, again.texts = 2, job.tokens, job.texts
    await again.publish([again.frame("started")])
    await again.publish([again.frame("tokens", [ChoiceFrame(index=0, offset=1, ids=[8], text="b")])])
    await again.finish("stop")
    got = await task
    assert_well_ended(got)
    assert "".join(c["choices"][0]["text"] for c in chunks(got)) == "ab"
