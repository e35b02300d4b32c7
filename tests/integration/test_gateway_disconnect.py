"""A client that goes away: when its job ends, and when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.protocol import Result, decode
from tests.integration.gateway_harness import Gateway, chat, completion, serve
from tests.support.worker_harness import POOL, harness


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[Gateway]:
    async with serve(valkey_url) as g:
        yield g


class Connection:
    """A raw connection, to be cut at will."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def cut(self) -> None:
        """Hang up without a word."""
        self._writer.transport.abort()

    async def until(self, text: bytes) -> bytes:
        """Read up to a text."""
        async with asyncio.timeout(10):
            return await self.reader.readuntil(text)


async def post(gateway: Gateway, path: str, body: dict[str, Any]) -> Connection:
    """Send a request and do not read."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
    await writer.drain()
    return Connection(reader, writer)


async def cancel_requested(gateway: Gateway, job_id: str) -> None:
    """Wait until a running job is flagged."""
    async with asyncio.timeout(10):
        while not (await gateway.store.get(job_id)).cancel_requested:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_queued(gateway: Gateway, path: str, stream: bool) -> None:
    body = chat() if "chat" in path else completion(["a", "b"])
    connection = await post(gateway, path, body | {"stream": stream})
    jobs = 1 if "chat" in path else 2
    async with asyncio.timeout(10):
        while await gateway.worker.queued() < jobs:
            await asyncio.sleep(0.005)
    (follower,) = gateway.services.hub.followers
    connection.cut()
    for track in follower.tracks:
        await gateway.until(track.job_id, "cancelled")
    assert await gateway.worker.queued() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(gateway: Gateway, stream: bool) -> None:
    connection = await post(gateway, "/v1/chat/completions", chat(stream=stream))
    job = await gateway.worker.pull()
    await job.start()
    connection.cut()
    await cancel_requested(gateway, job.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_middle(gateway: Gateway, stream: bool) -> None:
    connection = await post(gateway, "/v1/chat/completions", chat(stream=stream))
    job = await gateway.worker.pull()
    await job.say("token")
    if stream:
        await connection.until(b"token")
    connection.cut()
    await cancel_requested(gateway, job.id)
    await job.finish("abort", status="cancelled")
    view = await gateway.store.get(job.id)
    assert view.status == "cancelled"


async def test_while_tokenizing(gateway: Gateway) -> None:
    """Nothing is queued for a client that left before its prompt was ready."""
    entered, release = asyncio.Event(), asyncio.Event()
    prepare = gateway.services.preparer.prepare

    async def slow(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        await release.wait()
        return await prepare(*args, **kwargs)

    gateway.services.preparer.prepare = slow  # type: ignore[method-assign]
    connection = await post(gateway, "/v1/chat/completions", chat())
    await entered.wait()
    connection.cut()
    gateway.services.preparer.prepare = prepare  # type: ignore[method-assign]
    await served(gateway, release)
    assert await gateway.worker.queued() == 0
    assert gateway.services.hub.streams == 0


async def served(gateway: Gateway, release: asyncio.Event) -> None:
    """Let the request go on once the server knows that its client has gone, and wait until it is over."""
    registry = gateway.services.metrics.registry
    labels = {"method": "POST", "route": "/v1/chat/completions", "status": "499"}
    await asyncio.sleep(
        0.05
    )  # for the reset to arrive; if it has not, the job is queued and cancelled, which shows too
    release.set()
    async with asyncio.timeout(10):
        while not registry.get_sample_value("ropeway_http_requests_total", labels):
            await asyncio.sleep(0.005)


async def test_while_submitting(gateway: Gateway) -> None:
    """A job whose submit was under way when its client left is cancelled too."""
    entered, release = asyncio.Event(), asyncio.Event()
    submit = gateway.services.store.submit

    async def slow(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        await release.wait()
        return await submit(*args, **kwargs)

    gateway.services.store.submit = slow  # type: ignore[method-assign]
    connection = await post(gateway, "/v1/chat/completions", chat())
    await entered.wait()
    (follower,) = gateway.services.hub.followers
    connection.cut()
    await served(gateway, release)
    await gateway.until(follower.tracks[0].job_id, "cancelled")


@pytest.mark.parametrize("stream", [False, True])
async def test_background_goes_on(gateway: Gateway, stream: bool) -> None:
    connection = await post(gateway, "/v1/chat/completions", chat(stream=stream, background=True))
    job = await gateway.worker.pull()
    await job.say("a")
    connection.cut()
    async with asyncio.timeout(10):
        while gateway.services.hub.streams:
            await asyncio.sleep(0.005)
    await gateway.services.submitter.close()  # whatever would be cancelled is cancelled now
    assert not (await gateway.store.get(job.id)).cancel_requested
    await job.finish("stop")
    assert (await gateway.http.get(f"/v1/jobs/{job.id}")).json()["status"] == "completed"


async def test_a_grace_ends_with_a_cancel(valkey_url: str) -> None:
    async with serve(valkey_url, disconnect_grace_s=0.2) as gateway:
        connection = await post(gateway, "/v1/chat/completions", chat())
        job = await gateway.worker.pull()
        connection.cut()
        await cancel_requested(gateway, job.id)


async def test_a_client_back_within_its_grace_keeps_its_job(valkey_url: str) -> None:
    async with serve(valkey_url, disconnect_grace_s=0.5) as gateway:
        connection = await post(gateway, "/v1/chat/completions", chat(stream=True))
        job = await gateway.worker.pull()
        await job.say("a")
        await connection.until(b'"a"')
        connection.cut()
        async with gateway.http.stream("GET", f"/v1/jobs/{job.id}/events") as response:
            lines = response.aiter_lines()
            await anext(lines)
            await gateway.services.submitter.idle()
            assert not (await gateway.store.get(job.id)).cancel_requested
            await job.finish("stop")
            rest = [line async for line in lines]
        assert '"kind":"done"' in rest[-2]


async def test_readers_of_events_never_cancel(gateway: Gateway) -> None:
    job_id = (await gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat()})).json()["id"]
    job = await gateway.worker.pull()
    await job.say("a")
    for _ in range(2):
        async with gateway.http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
            await anext(response.aiter_lines())
    waiting = asyncio.create_task(gateway.http.get(f"/v1/jobs/{job_id}?wait=20"))
    async with asyncio.timeout(10):
        while gateway.services.hub.streams != 1:
            await asyncio.sleep(0.005)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(10):
        while gateway.services.hub.streams:
            await asyncio.sleep(0.005)
    await gateway.services.submitter.close()
    assert not (await gateway.store.get(job_id)).cancel_requested


async def test_cancelled_handlers_do_not_shift_replies(gateway: Gateway) -> None:
    """Commands cut off in the middle must not leave their answers to the next user of a connection."""
    store = gateway.services.store
    known = (await gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat()})).json()["id"]
    for round_ in range(100):
        task = asyncio.create_task(store.status(known))
        for _ in range(round_ % 7):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for _ in range(50):
        assert await store.status(known) == ("queued", 0)
        assert await store.read_log(known) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_real_worker_stops_within_a_few_steps(valkey_url: str, stream: bool) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(sim_step_ms=20)
        async with serve(valkey_url, card=False, flush_ms=0) as gateway:
            body = chat(stream=stream, max_tokens=3000, ignore_eos=True) | {"model": POOL}
            connection = await post(gateway, "/v1/chat/completions", body)
            job_id = (await worker.event("pulled"))["job_id"]
            async with asyncio.timeout(20):
                while (await gateway.store.status(job_id))[1] < 5:
                    await asyncio.sleep(0.005)
            connection.cut()
            await gateway.until(job_id, "cancelled")
            view = await gateway.store.get(job_id)
            assert view.result is not None
            assert decode(view.result, Result).usage.completion_tokens < 1000
            async with asyncio.timeout(20):
                while True:
                    (info,) = await gateway.store.live_workers(POOL, 60_000)
                    if info.running == 0 and info.free_blocks == info.total_blocks:
                        break
                    await asyncio.sleep(0.02)
            await h.assert_clean()


async def test_a_body_where_none_is_read_stops_nobody(valkey_url: str) -> None:
    """More than is taken, on a request without a body of its own: it ends, and its job is not touched."""
    async with serve(valkey_url, max_body_bytes=1024) as gateway:
        job_id = (await gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat()})).json()["id"]
        async with asyncio.timeout(20):
            response = await gateway.http.request("GET", f"/v1/jobs/{job_id}?wait=60", content=chunks(8))
        assert response.json()["status"] == "queued"
        assert await gateway.worker.queued() == 1


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 512
