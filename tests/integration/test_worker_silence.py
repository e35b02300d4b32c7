"""A network on which nothing arrives, and no connection is closed: the worker waits, says so, and goes on."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.redis_proxy import RedisProxy
from tests.support.redis_topology import is_one_server
from tests.support.worker_harness import expected, harness, job


async def ready(http: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(60):
        while (await http.get("/ready")).status_code != status:
            await asyncio.sleep(0.1)


async def test_a_worker_cut_off_by_silence_goes_on_with_what_it_has_and_takes_more(valkey_url: str) -> None:
    if not is_one_server(valkey_url):
        pytest.skip("the proxy stands in front of one server")
    async with RedisProxy(valkey_url) as proxy, harness(valkey_url) as h:  # the worker leaves through the proxy
        worker = await h.worker(url=proxy.url)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.health_port}") as http:
            await ready(http, 200)
            running, wakes_nobody = job(1, max_tokens=600), job(2, lane=1)
            follower = await h.submit(running)
            await follower.tokens(5)
            proxy.hold(requests=True)
            late = await h.submit(wakes_nobody)
            await ready(http, 503)
            assert (await http.get("/health")).status_code == 200, "nothing that a restart would mend"
            assert worker.alive
            proxy.go_on()
            for envelope, each in ((running, follower), (wakes_nobody, late)):
                frames = await each.end()
                assert [frame.seq for frame in frames] == list(range(1, len(frames) + 1))
                assert (await h.result(envelope.id)).choices == expected(envelope)
            assert {frame.epoch for frame in follower.frames} == {1}, "nobody else was there to take it"
            await ready(http, 200)
