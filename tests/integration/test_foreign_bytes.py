"""Pickles and msgpack extensions wherever somebody may leave them: none of them is run, and nobody stops serving."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shared import keys
from shared.keys import BUCKETS, CLASSES, JobId
from tests.integration.gateway_harness import events, running
from tests.support.worker_harness import LANES, POOL, Follower, Harness, harness, job

EXT = msgspec.msgpack.Ext(1, b"\x80\x04N.")


class Run:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def payloads(path: Path) -> list[bytes]:
    """A pickle of each protocol, extensions as a whole and inside of every message."""
    fields = (
        "v",
        "id",
        "owner",
        "pool",
        "seq",
        "epoch",
        "kind",
        "op",
        "choices",
        "sampling",
        "digest",
        "job_ids",
        "error",
    )
    encode = msgspec.msgpack.encode
    return [
        *(pickle.dumps(Run(path), protocol) for protocol in (0, 2, 5)),
        encode(EXT),
        encode({"v": 1, **dict.fromkeys(fields[1:], EXT)}),
        encode({**dict.fromkeys(fields, 1), "v": EXT}),
        encode([EXT] * 3),
    ]


@dataclass
class Setup:
    h: Harness
    http: httpx.AsyncClient
    path: Path

    async def held(self, **more: Any) -> tuple[Follower, JobId]:
        """A job that runs for long, and has begun."""
        envelope = job(1, max_tokens=3000, **more)
        follower = await self.h.submit(envelope)
        await follower.tokens(3)
        return follower, JobId.parse(envelope.id)


@pytest.fixture
async def setup(redis_url: str, tmp_path: Path) -> AsyncIterator[Setup]:
    async with (
        harness(redis_url, clean=False) as h,
        running(redis_url) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await h.worker()
        async with asyncio.timeout(30):
            while (await http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)
        yield Setup(h, http, tmp_path / "was-run")


async def in_queue_streams(s: Setup, data: bytes) -> None:
    for job_class in CLASSES:
        for bucket in range(BUCKETS):
            stream = keys.queue(POOL, 0, job_class, bucket)
            await s.h.client.xadd(stream, {"id": data, "cost": data})
            await s.h.client.xadd(stream, {data: data})
    await s.h.client.xadd(keys.resume(POOL, 0), {"id": data, "cost": data, "class": data, "bucket": data})


async def in_channels(s: Setup, data: bytes) -> None:
    follower, job_id = await s.held()
    asked = asyncio.create_task(s.http.get(f"/v1/jobs/{job_id}?wait=60"))
    for channel in (keys.events(job_id), keys.wake(POOL), keys.control(POOL)):
        await s.h.client.publish(channel, data)
    seen = len(follower.frames)
    follower_ = await s.h.follow(str(job_id))
    await follower_.tokens(seen + 10)
    await s.h.store.cancel(str(job_id))
    assert (await asked).json()["status"] == "cancelled"


async def in_a_log(s: Setup, data: bytes) -> None:
    _, job_id = await s.held()
    log = keys.events(job_id)
    await s.h.client.xadd(log, {"f": data}, id="999999-0")
    async with s.http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        told = [event.data async for event in events(response)]
    assert "error" in told[-1] or told[-1]["kind"] == "error"


async def in_a_result(s: Setup, data: bytes) -> None:
    envelope = job(2, max_tokens=3)
    await (await s.h.submit(envelope)).end()
    await s.h.client.hset(keys.job(JobId.parse(envelope.id)), "result", data)
    answer = await s.http.get(f"/v1/jobs/{envelope.id}")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] in ("protocol_error", "protocol_version")


async def in_an_envelope(s: Setup, data: bytes) -> None:
    await s.h.client.set(keys.paused(POOL), 1, ex=60)
    await s.h.client.publish(keys.control(POOL), msgspec.msgpack.encode({"op": "pause"}))
    envelope = job(3)
    await s.h.store.submit(envelope)
    await s.h.client.hset(keys.job(JobId.parse(envelope.id)), "env", data)
    assert (await s.http.get(f"/v1/jobs/{envelope.id}")).status_code == 500
    await s.h.client.delete(keys.paused(POOL))
    await s.h.client.publish(keys.control(POOL), msgspec.msgpack.encode({"op": "unpause"}))
    async with s.http.stream("GET", f"/v1/jobs/{envelope.id}/events") as response:
        told = [event.data async for event in events(response)]
    assert told[-1]["error"]["code"] in ("protocol_error", "protocol_version"), "its client is told"
    assert [letter.job_id for letter in await s.h.store.dead_letters(POOL, 0)] == [envelope.id]


async def in_the_registry(s: Setup, data: bytes) -> None:
    (owner,) = [worker.owner for worker in s.h._workers]
    await s.h.client.hset(keys.card(POOL), "card", data)
    await s.h.client.set(keys.tokenizer(POOL), data)
    await s.h.client.hset(keys.worker(POOL, owner), "info", data)
    await s.h.client.hset(keys.worker(POOL, "other"), "info", data)
    await s.h.client.expire(keys.worker(POOL, "other"), 60)
    await s.h.client.zadd(keys.workers(POOL), {"other": 2**45, data: 2**45})
    await s.h.client.sadd(keys.pools(), data)
    async with asyncio.timeout(30):
        while [info.owner for info in await s.h.store.live_workers(POOL, 60_000)] != [owner]:
            await asyncio.sleep(0.05)
        while await s.h.client.hget(keys.card(POOL), "card") == data:
            await asyncio.sleep(0.05)
    assert POOL in [model["id"] for model in (await s.http.get("/v1/models")).json()["data"]]


async def in_what_is_kept_of_a_tenant(s: Setup, data: bytes) -> None:
    headers = {"Idempotency-Key": "k"}
    body = {"model": POOL, "prompt": [11, 12], "max_tokens": 2}
    assert (await s.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    (name,) = [key async for key in s.h.client.scan_iter("rw:*:idem:*")]
    await s.h.client.set(name, data, keepttl=True)
    answer = await s.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "foreign_data"


async def in_a_dead_letter(s: Setup, data: bytes) -> None:
    ids = [str(JobId.new(POOL, 1)) for _ in range(2)]
    good = msgspec.msgpack.encode({"message": "m"})
    await s.h.client.xadd(keys.dead(POOL, 1), {"id": ids[0], "error": good, "env": b"", "attempts": 2})
    fields = {"error": data, "env": data, "attempts": data, "reason": data}
    await s.h.client.xadd(keys.dead(POOL, 1), {"id": ids[1], **fields})
    await s.h.client.xadd(keys.dead(POOL, 1), {"id": data, **fields})
    letters = await s.h.store.dead_letters(POOL, 1)
    assert [letter.job_id for letter in letters[1:]] == ids[::-1], "none hides the others"
    assert letters[2].error is not None and letters[2].attempts == 2
    assert letters[1].error is None and letters[1].envelope == data
    await s.h.client.delete(keys.dead(POOL, 1))


PLACES: list[Callable[[Setup, bytes], Awaitable[None]]] = [
    in_queue_streams, in_channels, in_a_log, in_a_result, in_an_envelope, in_the_registry, in_what_is_kept_of_a_tenant,
    in_a_dead_letter,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
async def test_nothing_is_run_and_everything_goes_on(setup: Setup, place: Any) -> None:
    for data in payloads(setup.path):
        await place(setup, data)
        answer = await setup.http.post("/v1/completions", json={"model": POOL, "prompt": [11, 12], "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        await setup.h.client.delete(*[key async for key in setup.h.client.scan_iter("rw:*:idem:*")], "none")
        await setup.h.client.delete(keys.dead(POOL, 0))
    assert not setup.path.exists()
    assert all(worker.alive for worker in setup.h._workers)
    fresh = job(9, max_tokens=10)
    assert (await (await setup.h.submit(fresh)).end())[-1].status == "completed"
    # What was in no counter is counted down when it is thrown out, until the next sweep counts anew.
    async with asyncio.timeout(60):
        while (await setup.h.store.pool_load(POOL, LANES)).queued_jobs != 0:
            await asyncio.sleep(0.2)
