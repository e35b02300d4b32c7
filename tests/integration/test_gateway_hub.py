"""The hub: order of subscribe and submit, lost connections, slow readers, lost data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.errors import JobLostError
from gateway.following import Follower
from shared import keys
from shared.errors import ServiceUnavailableError
from shared.keys import JobId
from shared.protocol import Frame
from tests.integration.gateway_harness import Gateway, Running, chat, completion, events, serve
from tests.support.redis_server import RedisServer
from tests.support.redis_topology import kill_clients, raw_client


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with serve(redis_url) as g:
        yield g


@pytest.fixture
async def admin(redis_url: str) -> AsyncIterator[Any]:
    client = await raw_client(redis_url)
    yield client
    await client.aclose()


async def submitted(gateway: Gateway) -> Running:
    """A running job that nobody follows."""
    response = await gateway.http.post("/v1/jobs", json={"kind": "completion", "body": completion()})
    assert response.status_code == 202
    return await gateway.worker.pull()


async def read(follower: Follower) -> list[Frame]:
    """Frames up to the last."""
    frames = []
    async with asyncio.timeout(30):
        while not follower.ended:
            frames += [frame for _, frame in await follower.next()]
    return frames


def text(frames: list[Frame]) -> str:
    return "".join(c.text for f in frames for c in f.choices)


async def kill_pubsub(admin: Any, gateway: Gateway) -> None:
    """Cut the hub's connection on the server's side."""
    assert await kill_clients(admin, "pubsub") >= 1


def sample(gateway: Gateway, name: str) -> float:
    return gateway.services.metrics.registry.get_sample_value(f"ropeway_gateway_{name}_total") or 0.0


async def test_a_job_is_submitted_only_when_its_channel_is_heard(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, admin: Any
) -> None:
    """The instant worker: whatever it publishes, the subscription stood before the job was there."""
    submit = gateway.services.store.submit
    heard: list[int] = []

    async def watched(envelope: Any, **kwargs: Any) -> Any:
        ((_, subscribers),) = await admin.pubsub_numsub(keys.events(JobId.parse(envelope.id)))
        heard.append(subscribers)
        return await submit(envelope, **kwargs)

    monkeypatch.setattr(gateway.services.store, "submit", watched)
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json=completion()))
    await (await gateway.worker.pull()).answer("a", "b")
    assert (await asked).json()["choices"][0]["text"] == "ab"
    assert heard == [1]
    assert sample(gateway, "log_reads") == 0


async def test_a_subscription_that_is_not_confirmed_submits_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.hub.CONFIRM_S", 0.05)
    monkeypatch.setattr(gateway.services.hub, "_receive", lambda *message: None)
    response = await gateway.http.post("/v1/completions", json=completion())
    assert response.status_code == 503
    assert await gateway.worker.queued() == 0
    assert gateway.services.hub.streams == 0


async def test_channels_are_given_back(gateway: Gateway, admin: Any) -> None:
    for _ in range(3):
        asked = asyncio.create_task(gateway.http.post("/v1/completions", json=completion(["a", "b"])))
        for _ in range(2):
            await (await gateway.worker.pull()).answer("x")
        await asked
    async with asyncio.timeout(10):
        while await admin.pubsub_channels("rw:*:ev:*"):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_killed_connection_in_mid_stream_loses_nothing(gateway: Gateway, admin: Any, stream: bool) -> None:
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json=completion(stream=stream)))
    job = await gateway.worker.pull()
    for i in range(60):
        await job.say(f"{i} ")
        if i % 20 == 10:
            await kill_pubsub(admin, gateway)
            async with asyncio.timeout(10):
                while not gateway.services.hub.connected or not await admin.pubsub_channels("rw:*:ev:*"):
                    await asyncio.sleep(0.005)
    await job.finish("stop")
    response = await asked
    expected = "".join(f"{i} " for i in range(60))
    if stream:
        got = [e.data async for e in events(response)]
        assert "".join(c["text"] for d in got[:-1] for c in d["choices"]) == expected
        assert got[-1] == "[DONE]"
    else:
        assert response.json()["choices"][0]["text"] == expected
    assert sample(gateway, "pubsub_reconnects") >= 3


async def test_what_was_published_while_disconnected_comes_from_the_log(gateway: Gateway, admin: Any) -> None:
    job = await submitted(gateway)
    async with await gateway.services.hub.follow([job.id]) as follower:
        await kill_pubsub(admin, gateway)
        for i in range(10):
            await job.say(f"{i}")
        await job.finish("stop")
        frames = await read(follower)
    assert text(frames) == "0123456789"
    assert [f.seq for f in frames] == list(range(1, 12))


async def test_a_lost_message_is_noticed_by_its_number(gateway: Gateway) -> None:
    job = await submitted(gateway)
    hub = gateway.services.hub
    receive, dropped = hub._receive, 0

    def lossy(kind: bytes, name: bytes, data: object) -> None:
        nonlocal dropped
        if kind == b"message" and dropped < 3:
            dropped += 1
            return
        receive(kind, name, data)

    async with await hub.follow([job.id]) as follower:
        hub._receive = lossy  # type: ignore[method-assign]
        for i in range(6):
            await job.say(f"{i}")
        await job.finish("stop")
        assert text(await read(follower)) == "012345"
    assert dropped == 3


async def test_silence_is_looked_into(gateway: Gateway) -> None:
    """No message ever comes: the log is read after a while anyway."""
    job = await submitted(gateway)
    hub = gateway.services.hub
    async with await hub.follow([job.id]) as follower:
        hub._receive = lambda *message: None  # type: ignore[method-assign]
        await job.answer("x")
        assert text(await read(follower)) == "x"


async def test_messages_that_come_twice_or_broken_are_dropped(gateway: Gateway, admin: Any) -> None:
    job = await submitted(gateway)
    channel = keys.events(JobId.parse(job.id))
    async with await gateway.services.hub.follow([job.id]) as follower:
        frame = job.frame("started")
        await job.publish([frame])
        for junk in (frame, frame, b"\x80\x04}q\x00.", b"", b"\xc1", b"{}", b"\xc7\x05\x01hello"):
            await admin.publish(channel, junk)
        await job.say("a")
        await admin.publish(channel, frame)
        await job.finish("stop")
        frames = await read(follower)
    assert text(frames) == "a"
    assert [f.seq for f in frames] == [1, 2, 3]


async def test_a_slow_reader_moves_to_the_log_and_misses_nothing(redis_url: str) -> None:
    async with serve(redis_url, stream_queue_frames=8) as gateway:
        job = await submitted(gateway)
        async with (
            await gateway.services.hub.follow([job.id]) as slow,
            await gateway.services.hub.follow([job.id]) as fast,
        ):
            reader = asyncio.create_task(read(fast))
            most = 0
            for start in range(0, 600, 50):
                frames = []
                for i in range(start, start + 50):
                    frames.append(token(job, i))
                await job.publish(frames)
                most = max(most, slow.tracks[0].waiting)
            await job.finish("stop")
            assert text(await reader) == text(await read(slow)) == "".join(f"{i} " for i in range(600))
        assert most <= 8
        assert sample(gateway, "queue_overflows") > 0


def token(job: Running, number: int) -> bytes:
    from shared.protocol import ChoiceFrame

    offset = len(job.tokens.get(0, []))
    return job.frame("tokens", [ChoiceFrame(index=0, offset=offset, ids=[7], text=f"{number} ")])


async def test_a_client_that_does_not_read_costs_no_memory(redis_url: str) -> None:
    """A stalled socket stops its stream; what it has not read stays in the log."""
    async with serve(redis_url, stream_queue_frames=4) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        job = await submitted(gateway)
        writer.write(f"GET /v1/jobs/{job.id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await writer.drain()
        async with asyncio.timeout(10):
            while not gateway.services.hub.streams:
                await asyncio.sleep(0.005)
        (follower,) = gateway.services.hub.followers
        filler = "x" * 20_000
        for _ in range(300):  # 6 MB, more than the sockets hold
            await job.say(filler)
        assert follower.tracks[0].waiting <= 4
        assert follower.tracks[0].seq < 300
        await job.finish("stop")
        received, done = 0, False
        async with asyncio.timeout(60):
            while not done:
                chunk = await reader.read(1 << 20)
                received += chunk.count(b"id: ")
                done = b'"kind":"done"' in chunk or not chunk
        writer.close()
        assert received >= 295  # a few are cut by the edges of what was read at once
        assert done


async def test_two_subscribers_and_one_leaves(gateway: Gateway) -> None:
    job = await submitted(gateway)
    hub = gateway.services.hub
    async with await hub.follow([job.id]) as stays:
        async with await hub.follow([job.id]):
            await job.say("a")
        await job.say("b")
        async with await hub.follow([job.id]) as late:
            late.tracks[0].look()
            await job.finish("stop")
            assert text(await read(stays)) == text(await read(late)) == "ab"


async def test_leaving_and_coming_back_at_once_is_confirmed_anew(gateway: Gateway, admin: Any) -> None:
    """An old confirmation must not stand for a new subscription."""
    job = await submitted(gateway)
    hub, channel = gateway.services.hub, keys.events(JobId.parse(job.id))
    for _ in range(30):
        impatient = asyncio.create_task(hub.follow([job.id]))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        async with await hub.follow([job.id]):
            assert (await admin.pubsub_numsub(channel))[0][1] == 1


async def test_a_job_that_redis_forgot_ends_with_an_error(
    gateway: Gateway, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json=completion()))
    await gateway.worker.pull()
    await admin.flushall()
    response = await asked
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "job_lost"


async def test_a_log_with_a_hole_ends_with_an_error(gateway: Gateway, admin: Any) -> None:
    job = await submitted(gateway)
    # Heard before there is a hole: a cluster passes messages on late, and a late one would fill it.
    async with await gateway.services.hub.follow([job.id]) as follower:
        await job.answer("a", "b", "c")
        await read(follower)
    await admin.xdel(keys.events(JobId.parse(job.id)), "2-0")
    async with await gateway.services.hub.follow([job.id]) as follower:
        follower.tracks[0].look()
        with pytest.raises(JobLostError):
            await read(follower)


async def test_streams_outlive_a_restart_of_redis() -> None:
    server = RedisServer("valkey", appendonly=True, extra=["--appendfsync", "always"])
    server.start()
    try:
        async with serve(server.url) as gateway:
            asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=chat(stream=True)))
            job = await gateway.worker.pull()
            await job.say("before ")
            server.kill()
            async with asyncio.timeout(10):
                while gateway.services.hub.connected:
                    await asyncio.sleep(0.005)
            server.start()
            async with asyncio.timeout(20):
                while True:
                    try:
                        await job.say("after")
                        break
                    except ServiceUnavailableError:
                        job.seq -= 1
                        job.tokens[0].pop()
                        await asyncio.sleep(0.05)
            await job.finish("stop")
            got = [e.data async for e in events(await asked)]
            assert got[-1] == "[DONE]"
            assert "".join(d["choices"][0]["delta"].get("content", "") for d in got[:-1]) == "before after"
    finally:
        server.close()


async def test_a_job_that_no_worker_takes_ends_at_its_deadline(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.generation.DEADLINE_SLACK_S", 0.1)
    async with serve(valkey_url, deadline_s=0.2, keepalive_s=0.1) as gateway:
        response = await gateway.http.post("/v1/completions", json=completion())
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await gateway.services.submitter.idle()
        assert await gateway.worker.queued() == 0
        response = await gateway.http.post("/v1/chat/completions", json=chat(stream=True))
        assert response.status_code == 200  # a comment had gone out before the deadline came
        assert response.text.startswith((": keepalive", "data: "))
        assert ": keepalive" in response.text
        assert response.text.count('"code":"deadline_exceeded"') == 1
        assert response.text.count("[DONE]") == 1


async def test_a_silent_stream_is_kept_alive(valkey_url: str) -> None:
    async with serve(valkey_url, keepalive_s=0.1) as gateway:
        asked = asyncio.create_task(
            gateway.http.send(
                gateway.http.build_request("POST", "/v1/chat/completions", json=chat(stream=True)), stream=True
            )
        )
        response = await asked  # the headers come before any token does
        lines = response.aiter_lines()
        seen = [await anext(lines) for _ in range(6)]
        assert seen.count(": keepalive") >= 1
        job = await gateway.worker.pull()
        await job.answer("x")
        rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
