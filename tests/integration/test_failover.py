"""A primary is killed while jobs run and stream: its replica takes over, and nobody has to be restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from shared import keys
from shared.protocol import Envelope
from tests.integration.gateway_harness import Event, events, running
from tests.support.redis_topology import QUICK_MS, Topology, topology_with_replicas
from tests.support.worker_harness import LANES, POOL, Harness, expected, harness, job

SERVED = {lane: keys.stats(POOL, lane) for lane in range(LANES)}


@pytest.fixture(params=["sentinel", "cluster"])
def watched(request: pytest.FixtureRequest) -> Iterator[Topology]:
    """The servers notice by themselves that one is gone."""
    with topology_with_replicas(request.param, QUICK_MS) as topology:
        yield topology


@pytest.fixture(params=["sentinel", "cluster"])
def unwatched(request: pytest.FixtureRequest) -> Iterator[Topology]:
    """A replica takes over when it is told to."""
    with topology_with_replicas(request.param) as topology:
        yield topology


@asynccontextmanager
async def gateway(url: str, submit_replicas: int = 1) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that accepts what so many replicas have."""
    async with (
        running(url, submit_replicas=submit_replicas, submit_replica_timeout_ms=2000) as (base_url, _),
        httpx.AsyncClient(base_url=base_url, timeout=90) as http,
    ):
        yield http


class Stream:
    """A job as it is streamed over HTTP."""

    def __init__(self, http: httpx.AsyncClient, envelope: Envelope, lane: int | None = None) -> None:
        self.envelope, self._http = envelope, http
        self._body = body(envelope, lane) | {"stream": True}
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(lambda _: self._news.set())

    async def _read(self) -> None:
        async with self._http.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200, await response.aread()
            self.job_id = response.headers["x-ropeway-job-id"]
            async for event in events(response):
                self.events.append(event)
                self._news.set()

    async def until(self, count: int) -> None:
        """Wait until so many events have come."""
        async with asyncio.timeout(60):
            while len(self.events) < count and not self._task.done():
                self._news.clear()
                await self._news.wait()
        if self._task.done():
            self._task.result()

    async def end(self) -> None:
        """Wait for the end; nothing may be missing, twice, or out of order."""
        async with asyncio.timeout(90):
            await self._task
        assert self.events[-1].data == "[DONE]"
        chunks = [event.data for event in self.events[:-1]]
        assert all("error" not in chunk for chunk in chunks), chunks[-1]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert text == expected(self.envelope)[0].text
        ids = [int(event.id) for event in self.events if event.id]
        assert ids == sorted(set(ids)) and ids[-1] - ids[0] + 1 == len(ids)


def body(envelope: Envelope, lane: int | None = None) -> dict[str, Any]:
    """The request for a job; the lane is chosen by a prompt cache key."""
    params = envelope.sampling
    request = {"model": POOL, "prompt": envelope.prompt_token_ids, "max_tokens": params.max_tokens}
    request |= {"seed": params.seed, "ignore_eos": True}
    if lane is not None:
        names = (f"key-{n}" for n in range(10_000))
        request["prompt_cache_key"] = next(
            name for name in names if keys.lane_of(LANES, adapter=None, prompt_cache_key=name, token_ids=[]) == lane
        )
    return request


async def attempts(h: Harness, streams: list[Stream]) -> set[int]:
    return {(await h.store.get(stream.job_id)).attempts for stream in streams}


async def accepted(http: httpx.AsyncClient, envelope: Envelope, lane: int) -> None:
    """A job that is tried again as long as its client is asked to, and answered."""
    async with asyncio.timeout(60):
        while True:
            response = await http.post("/v1/completions", json=body(envelope, lane))
            if response.status_code == 200:
                break
            assert response.status_code == 503, response.text
            await asyncio.sleep(float(response.headers["retry-after"]))
    assert response.json()["choices"][0]["text"] == expected(envelope)[0].text


async def test_streams_go_on_when_the_replica_takes_over(watched: Topology) -> None:
    async with harness(watched.url) as h, gateway(watched.url) as http:
        await asyncio.gather(h.worker(lease_s=2.0), h.worker(lease_s=2.0))
        streams = [Stream(http, job(n, max_tokens=250), lane=n % LANES) for n in range(6)]
        for stream in streams:
            await stream.until(10)
        lost = watched.serving(SERVED[0])
        await asyncio.to_thread(watched.until_replicated)
        await asyncio.to_thread(lost.kill)
        await asyncio.to_thread(watched.until_failed_over, SERVED[0], lost)
        for stream in streams:
            await stream.end()
        assert await attempts(h, streams) == {1}, "an outage is no fault of a job"
        # The old primary comes back as it was, and is made a replica. Only then there is one that can have a job.
        await asyncio.to_thread(lost.start)
        await accepted(http, job(50, max_tokens=20), lane=0)
        assert watched.serving(SERVED[0]) is not lost
        await h.assert_clean()


async def test_while_no_replica_has_taken_over(unwatched: Topology) -> None:
    lease_s = 3.0
    async with harness(unwatched.url, clean=False) as h, gateway(unwatched.url, submit_replicas=0) as http:
        workers = await asyncio.gather(h.worker(lease_s=lease_s), h.worker(lease_s=lease_s))
        lost = unwatched.serving(SERVED[0])
        touched = [lane for lane in SERVED if unwatched.serving(SERVED[lane]) is lost]
        streams = {lane: Stream(http, job(lane, max_tokens=200), lane=lane) for lane in SERVED}
        for stream in streams.values():
            await stream.until(10)
        await asyncio.to_thread(unwatched.until_replicated)
        await asyncio.to_thread(lost.kill)

        refused = await http.post("/v1/completions", json=body(job(60), lane=0))
        assert refused.status_code == 503 and float(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "service_unavailable"
        for lane in set(SERVED) - set(touched):  # one node's outage is that of its lanes alone
            await streams[lane].end()
            view = await h.store.get(streams[lane].job_id)
            told = [ln for worker in workers for ln in worker.lines if ln.get("job_id") == view.id]
            assert view.epoch == 1, "\n".join(map(str, told))
        # For longer than the lease, so that everything of this node looks abandoned afterwards.
        await asyncio.sleep(1.5 * lease_s)
        assert all(worker.alive for worker in workers)

        await asyncio.to_thread(unwatched.take_over, SERVED[0])
        for lane in touched:
            await streams[lane].end()
        assert await attempts(h, list(streams.values())) == {1}
        assert not any(line["event"] == "lease lost" for worker in workers for line in worker.lines)
        await accepted(http, job(61, max_tokens=20), lane=0)
        await h.assert_clean()
