"""Redis answers, but not what was asked: it loads, or is a replica by now. Everybody waits, and clients are told."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.gateway_harness import events, running
from tests.support.redis_proxy import OneAnswerServer
from tests.support.redis_server import RedisServer, binary
from tests.support.worker_harness import POOL, expected, harness, job


def body(**more: Any) -> dict[str, Any]:
    return {"model": POOL, "prompt": [11, 12, 13], "max_tokens": 5, "ignore_eos": True, "seed": 1, **more}


def kinds() -> list[str]:
    return [kind for kind in ("valkey", "redis") if binary(kind) is not None]


async def served(http: httpx.AsyncClient) -> None:
    """Wait until a request is answered; until then it must be refused as one should."""
    async with asyncio.timeout(60):
        while (response := await http.post("/v1/completions", json=body())).status_code != 200:
            assert response.status_code in (404, 503), response.text
            if response.status_code == 503:
                assert int(response.headers["retry-after"]) >= 1
            await asyncio.sleep(0.1)
    assert response.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("kind", kinds())
async def test_while_redis_loads(kind: str) -> None:
    loading = OneAnswerServer(b"-LOADING Redis is loading the dataset in memory")
    async with (
        loading,
        harness(url := loading.url, clean=False) as h,
        running(url) as (gateway, services),
        httpx.AsyncClient(base_url=gateway, timeout=60) as http,
    ):
        worker = await h.worker(ready=False)
        await worker.event("heartbeat failed, trying again")
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        before = loading.commands
        await asyncio.sleep(3)
        assert 0 < loading.commands - before < 300, "they ask again, with back-off"
        assert worker.alive
        await loading.stop()
        server = RedisServer(kind)
        server.port = urlsplit(url).port or 0
        try:
            await asyncio.to_thread(server.start)
            await worker.event("worker is ready")
            await served(http)
            assert services.hub.connected
        finally:
            await worker.stop()
            server.close()


@pytest.mark.parametrize("kind", kinds())
async def test_while_the_primary_is_a_replica(kind: str) -> None:
    """As after a failover that the others do not know of yet: READONLY in the middle of streams."""
    server = RedisServer(kind)
    server.start()
    try:
        async with (
            harness(server.url) as h,
            running(server.url) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=60) as http,
        ):
            worker = await h.worker()
            await served(http)
            envelope = job(1, max_tokens=300)
            follower = await h.submit(envelope)
            text, begun = "", asyncio.Event()

            async def read() -> None:
                nonlocal text
                async with http.stream("POST", "/v1/completions", json=body(max_tokens=300, stream=True)) as response:
                    async for event in events(response):
                        if event.data != "[DONE]":
                            text += event.data["choices"][0]["text"] if event.data["choices"] else ""
                            begun.set()

            stream = asyncio.create_task(read())
            async with asyncio.timeout(60):
                await begun.wait()
            await follower.tokens(10)
            await h.client.execute_command("REPLICAOF", "127.0.0.1", "1")
            refused = await http.post("/v1/completions", json=body())
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "service_unavailable"
            await asyncio.sleep(1.5)  # longer than the lease
            assert worker.alive
            await h.client.execute_command("REPLICAOF", "NO", "ONE")
            assert {frame.epoch for frame in await follower.end()} == {1}
            assert (await h.result(envelope.id)).choices == expected(envelope)
            async with asyncio.timeout(60):
                await stream
            whole = (await http.post("/v1/completions", json=body(max_tokens=300))).json()["choices"][0]["text"]
            assert text == whole
            await served(http)
    finally:
        server.close()
