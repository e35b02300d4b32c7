"""The gateway's one subscription when it falls silent, and when the gateway itself stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.connect import connect, connect_sync
from shared.jobs import Publish
from shared.jobstore import JobStore, SyncJobStore
from shared.protocol import ChoiceFrame
from tests.integration.gateway_harness import Gateway, Running, Worker, completion, events, serve
from tests.support.redis_proxy import RedisProxy
from tests.support.redis_server import RedisServer, binary
from tests.support.redis_topology import is_one_server


def reconnects(gateway: Gateway) -> float:
    return gateway.services.metrics.registry.get_sample_value("ropeway_gateway_pubsub_reconnects_total") or 0.0


async def streamed(gateway: Gateway, told: asyncio.Event) -> str:
    """The text of a streamed completion; `told` is set with its first piece."""
    text = ""
    async with gateway.http.stream("POST", "/v1/completions", json=completion(stream=True), timeout=120) as response:
        assert response.status_code == 200
        data: Any = None
        async for event in events(response):
            data = event.data
            if data != "[DONE]":
                text += "".join(choice["text"] for choice in data["choices"])
                told.set()
    assert data == "[DONE]"
    return text


@asynccontextmanager
async def worker_on(url: str) -> AsyncIterator[Worker]:
    client = connect(url)
    yield Worker(JobStore(client))
    await client.aclose()


async def test_a_subscription_that_falls_silent_is_taken_anew(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing arrives and no connection is closed: as behind a proxy that is stuck."""
    if not is_one_server(valkey_url):
        pytest.skip("the proxy stands in front of one server")
    monkeypatch.setattr("gateway.hub.PING_S", 1.0)
    async with RedisProxy(valkey_url) as proxy, serve(proxy.url) as gateway, worker_on(valkey_url) as worker:
        told = asyncio.Event()
        asked = asyncio.create_task(streamed(gateway, told))
        job = await worker.pull()
        await job.say("a")
        async with asyncio.timeout(30):
            await told.wait()
            await asyncio.sleep(2.5)
            assert reconnects(gateway) == 0, "silence alone is no loss: what is asked is answered"
            proxy.hold(requests=True)
            await job.say("b")
            while not reconnects(gateway):
                await asyncio.sleep(0.01)
            proxy.go_on()
            await job.say("c")
            await job.finish("stop")
            assert await asked == "abc"


async def test_while_the_gateway_stands_still_more_comes_than_redis_keeps_for_it() -> None:
    """Redis cuts the subscription off. What was missed is in the log, and other streams are as good."""
    server = RedisServer("redis" if binary("redis") else "valkey")
    server.start()
    client = connect_sync(server.url)
    try:
        with server.client() as admin:
            admin.config_set("client-output-buffer-limit", "pubsub 1mb 0 0")
        async with serve(server.url) as gateway:
            told = [asyncio.Event(), asyncio.Event()]
            asked = [asyncio.create_task(streamed(gateway, each)) for each in told]
            jobs = [await gateway.worker.pull() for _ in asked]
            for job in jobs:
                await job.say("begin ")
            async with asyncio.timeout(30):
                for each in told:
                    await each.wait()
            store = SyncJobStore(client)
            for number in range(400):  # 20 MB, while the loop of the gateway, which is this one, does nothing
                _say(store, jobs[0], f"{number} ".ljust(50_000, "."))
            await jobs[1].say("and end")
            for job in jobs:
                await job.finish("stop")
            async with asyncio.timeout(120):
                texts = sorted([await each for each in asked], key=len)
            assert texts[0] == "begin and end"
            assert texts[1] == "begin " + "".join(f"{number} ".ljust(50_000, ".") for number in range(400))
            assert reconnects(gateway) >= 1, "it was not cut off, so nothing was tried here"
    finally:
        client.close()
        server.close()


def _say(store: SyncJobStore, job: Running, text: str) -> None:
    offset = len(job.tokens.get(0, []))
    frame = job.frame("tokens", [ChoiceFrame(index=0, offset=offset, ids=[7], text=text)])
    store.publish([Publish(job.id, job.worker.owner, job.job.epoch, job.seq, [frame])])


async def test_pages_of_a_log_are_as_long_as_its_frames_are_small(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a reader who comes late, to large frames behind small ones and small ones behind large."""
    async with serve(valkey_url) as gateway:
        store, pages = gateway.services.store, []
        read_log = store.read_log

        async def watched(job_id: str, after_seq: int = 0, count: int = 1000) -> list[bytes]:
            page = await read_log(job_id, after_seq, count)
            pages.append((len(page), sum(map(len, page))))
            return page

        monkeypatch.setattr(store, "read_log", watched)
        order = {"kind": "completion", "body": completion()}
        assert (await gateway.http.post("/v1/jobs", json=order)).status_code == 202
        job = await gateway.worker.pull()
        sizes = [500_000] * 12 + [10] * 2000 + [500_000] * 12
        for number, size in enumerate(sizes):
            frame = job.frame("tokens", [ChoiceFrame(offset=number, ids=[7], text="x" * size)])
            await job.publish([frame])
        await job.finish("stop")
        async with await gateway.services.hub.follow([job.id]) as late:
            late.tracks[0].look()
            seen = []
            async with asyncio.timeout(60):
                while not late.ended:
                    seen += [frame.seq for _, frame in await late.next()]
        assert seen == list(range(1, len(sizes) + 2))
        assert max(size for _, size in pages) < 7_000_000
        assert max(count for count, _ in pages) > 100, "small ones come in long pages"
        assert len(pages) < 60
