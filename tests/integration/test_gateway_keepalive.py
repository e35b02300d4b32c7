"""Comments in silent streams: no reader may take one for an event, wherever it falls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai._streaming import SSEDecoder

from ropeway.client._sse import SseDecoder
from shared.protocol import ErrorInfo
from tests.integration.gateway_harness import Gateway, Running, chat, completion, serve

COMMENT = b": keepalive"


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[Gateway]:
    async with serve(valkey_url, keepalive_s=0.05) as g:
        yield g


class _Tee(httpx.AsyncByteStream):
    def __init__(self, stream: Any, wire: Wire) -> None:
        self._stream, self._wire = stream, wire

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._wire.seen += chunk
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class Wire(httpx.AsyncHTTPTransport):
    """Remembers what a client has read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = b""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        response.stream = _Tee(response.stream, self)
        return response

    async def silence(self) -> None:
        """Wait until two more comments have come."""
        wanted = self.seen.count(COMMENT) + 2
        async with asyncio.timeout(20):
            while self.seen.count(COMMENT) < wanted:
                await asyncio.sleep(0.005)

    def check(self) -> None:
        """Every blank line ends an event that has data."""
        *blocks, rest = self.seen.split(b"\n\n")
        assert rest == b""
        assert all(any(line.startswith(b"data:") for line in block.splitlines()) for block in blocks)


async def answer_slowly(job: Running, wire: Wire, *texts: str) -> None:
    """An answer with a silence before, between and behind its tokens."""
    await wire.silence()
    await job.start()
    for text in texts:
        await wire.silence()
        await job.say(text)
    await wire.silence()
    await job.finish("stop")


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_the_openai_client_reads_over_them(gateway: Gateway, kind: str, usage: bool) -> None:
    wire = Wire()
    options: dict[str, Any] = {"stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}

    async def collect(client: openai.AsyncOpenAI) -> list[Any]:
        if kind == "chat":
            return [chunk async for chunk in await client.chat.completions.create(**chat(**options))]
        return [chunk async for chunk in await client.completions.create(**completion(**options))]

    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="x", max_retries=0, http_client=httpx.AsyncClient(transport=wire)
    ) as client:
        reading = asyncio.create_task(collect(client))
        await answer_slowly(await gateway.worker.pull(), wire, "Hel", "lo", "!")
        chunks = await reading
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = [choice.delta.content if kind == "chat" else choice.text for choice in choices]
    assert "".join(text or "" for text in texts) == "Hello!"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert (chunks[-1].usage is not None) is usage
    wire.check()


async def test_readers_of_events_read_over_them(gateway: Gateway) -> None:
    order = {"kind": "chat", "body": chat()}
    job_id = (await gateway.http.post("/v1/jobs", json=order)).json()["id"]
    wire = Wire()
    async with httpx.AsyncClient(transport=wire, base_url=gateway.url, timeout=30) as http:
        reading = asyncio.create_task(http.get(f"/v1/jobs/{job_id}/events"))
        await answer_slowly(await gateway.worker.pull(), wire, "Hel", "lo")
        body = (await reading).content
    wire.check()

    async def whole() -> AsyncIterator[bytes]:
        yield body

    theirs = [(event.id, event.data) async for event in SSEDecoder().aiter_bytes(whole())]
    assert [(event.id, event.data) for event in SseDecoder().feed(body)] == theirs
    frames = [json.loads(data) for _, data in theirs]
    assert [number for number, _ in theirs] == [str(frame["seq"]) for frame in frames] == ["1", "2", "3", "4"]
    assert "".join(choice["text"] for frame in frames for choice in frame["choices"]) == "Hello"


async def test_an_error_behind_them_is_still_an_error(gateway: Gateway) -> None:
    wire = Wire()
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="x", max_retries=0, http_client=httpx.AsyncClient(transport=wire)
    ) as client:

        async def collect() -> None:
            async for _ in await client.chat.completions.create(**chat(stream=True)):
                pass

        reading = asyncio.create_task(collect())
        job = await gateway.worker.pull()
        await job.say("x")
        await wire.silence()
        await job.finish(None, status="failed", error=ErrorInfo(message="m", code="engine_error"))
        with pytest.raises(openai.APIError, match=job.id):
            await reading
    wire.check()
