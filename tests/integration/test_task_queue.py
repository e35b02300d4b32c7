"""The queue of background tasks: which tasks wait in it, whatever a crash left half done, and who puts them back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from shared.adapter_record import PendingLoad
from shared.adapter_store import FolderStore
from shared.adapters import Adapters
from shared.connect import connect, connect_sync
from shared.lora.source import upload_source
from shared.task_queue import QUEUE, TaskQueue, starting_key, task_id
from tasks.scheduler import TaskScheduler
from tests.integration.test_adapter_tasks import MODEL, ended, prepare
from tests.support.adapter_tasks import tasks, write_adapter

LIST, TAKEN, DUE = f"rq:queue:{QUEUE}", f"rq:queue:{QUEUE}:intermediate", f"rq:scheduled:{QUEUE}"
PENDING = PendingLoad(version=1, source="/a", since_ms=7)


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    client = connect_sync(valkey_url)
    if not isinstance(client, redis.Redis):
        pytest.skip("background tasks cannot be kept in a cluster")
    yield client
    client.close()


@pytest.fixture
def queue(client: redis.Redis, valkey_url: str) -> Iterator[TaskQueue]:
    queue = TaskQueue(valkey_url, 60)
    yield queue
    queue.close()


def test_a_task_waits_where_it_is_in_the_queue_and_not_where_it_only_says_so(
    client: redis.Redis, queue: TaskQueue
) -> None:
    assert not queue.waits("x", PENDING)
    queue.load_adapter("x", PENDING)
    name = task_id("x", PENDING)
    assert queue.waits("x", PENDING) and not queue.waits("y", PENDING)
    client.lmove(LIST, TAKEN)
    assert queue.waits("x", PENDING), "somebody is about to begin it"
    client.delete(TAKEN)
    assert not queue.waits("x", PENDING), "its place in the queue is lost"
    client.set(starting_key(name), "", ex=60)
    assert queue.waits("x", PENDING), "its process is being started"
    client.delete(starting_key(name))
    client.hset(f"rq:job:{name}", "status", "scheduled")
    assert not queue.waits("x", PENDING)
    client.zadd(DUE, {name: 1})
    assert queue.waits("x", PENDING)
    client.hset(f"rq:job:{name}", "status", "started")
    assert not queue.waits("x", PENDING)


def test_the_task_of_a_name_that_was_unloaded_does_not_stand_for_a_new_one(
    client: redis.Redis, queue: TaskQueue
) -> None:
    """Versions begin anew with the name, and the old task may be one that is tried again in a minute."""
    queue.load_adapter("x", PENDING)
    queue.load_adapter("x", PENDING)
    assert client.llen(LIST) == 1
    queue.load_adapter("x", msgspec.structs.replace(PENDING, since_ms=8))
    queue.load_adapter("x", msgspec.structs.replace(PENDING, starts=1))
    assert client.llen(LIST) == 3


async def test_a_task_that_lost_its_place_in_the_queue_is_queued_again(
    client: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    commands = connect(valkey_url)
    await prepare(commands)
    adapters = Adapters(commands)
    source = write_adapter(tmp_path / "roots" / "a")
    pending = PendingLoad(version=0, source=str(source), since_ms=await adapters.clock_ms())
    record, *_ = await adapters.begin("x", MODEL, pending, replace=False)
    assert record.pending is not None
    name = task_id("x", record.pending)
    client.hset(f"rq:job:{name}", mapping={"status": "queued", "created_at": "2026-01-01T00:00:00.000000Z"})
    with tasks(valkey_url, tmp_path):
        assert (await ended(adapters, seconds=120)).content is not None
        (lock,) = client.keys("rq:scheduler-lock:*")
        assert 0 < client.ttl(lock) <= 15, "RQ's own would last a minute"
    await commands.aclose()


async def test_what_was_uploaded_for_a_load_that_is_given_up_is_gone(
    client: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    commands = connect(valkey_url)
    await prepare(commands)
    adapters, store, upload = Adapters(commands), FolderStore(tmp_path / "store"), "ab" * 16
    store.create_upload(upload, "adapter_config.json").close()
    pending = PendingLoad(version=0, source=upload_source(upload), since_ms=1, starts=3)
    await adapters.begin("x", MODEL, pending, replace=False)
    with tasks(valkey_url, tmp_path):
        assert "given up" in ((await ended(adapters)).error or "")
        async with asyncio.timeout(60):
            while (tmp_path / "store" / "uploads" / upload).exists():
                await asyncio.sleep(0.02)
    await commands.aclose()


def test_a_scheduler_that_died_is_soon_replaced(client: redis.Redis, queue: TaskQueue, valkey_url: str) -> None:
    first, second = (TaskScheduler(client, 15.0, "WARNING") for _ in range(2))
    queue.load_adapter("x", PENDING)
    client.delete(LIST)
    name = task_id("x", PENDING)
    client.hset(f"rq:job:{name}", "status", "scheduled")
    client.zadd(DUE, {name: 1})
    assert first.acquire_locks() == first.acquire_locks() == {QUEUE}
    (lock,) = client.keys("rq:scheduler-lock:*")
    assert 0 < client.ttl(lock) <= 15
    second.queue_due()
    assert client.zcard(DUE) == 1, "the first one may be at it"
    client.delete(lock)  # its time is over
    second.queue_due()
    assert client.zcard(DUE) == 0 and client.lrange(LIST, 0, -1) == [name.encode()]
    assert first.acquire_locks() == set()
