"""Redis is killed and comes back without data: what ran ends with an error, and everything new works."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.integration.gateway_harness import Event, events, running
from tests.support.redis_server import RedisServer
from tests.support.worker_harness import POOL, harness


def body(max_tokens: int) -> dict[str, Any]:
    return {"model": POOL, "prompt": [[11, 12, 13]], "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}


async def test_gateway_and_worker_outlive_it() -> None:
    server = RedisServer("valkey")
    server.start()
    try:
        async with (
            harness(server.url) as h,
            running(server.url) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=60) as http,
        ):
            worker = await h.worker()
            got: list[Event] = []
            begun = asyncio.Event()

            async def read() -> None:
                request = body(4000) | {"stream": True}
                async with http.stream("POST", "/v1/completions", json=request) as response:
                    assert response.status_code == 200, await response.aread()
                    async for event in events(response):
                        got.append(event)
                        begun.set()

            async with asyncio.timeout(60):  # until the gateway has heard of the pool
                while not (await http.get("/v1/models")).json()["data"]:
                    await asyncio.sleep(0.1)
            stream = asyncio.create_task(read())
            waiting = asyncio.create_task(begun.wait())
            await asyncio.wait({stream, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            assert begun.is_set(), stream.result() if stream.done() else "no event in a minute"
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

            async with asyncio.timeout(60):
                await stream
            assert got[-1].data == "[DONE]" and got[-2].data["error"]["code"] == "job_lost"
            await worker.event("fenced", "lease lost")
            await worker.event("card written again")
            async with asyncio.timeout(60):
                while (response := await http.post("/v1/completions", json=body(5))).status_code != 200:
                    assert response.status_code in (404, 503), response.text
                    await asyncio.sleep(0.1)
            assert response.json()["usage"]["completion_tokens"] == 5
            assert worker.alive
            await h.assert_clean()
    finally:
        server.close()
