"""What waits in the queues of background tasks, as gateways and tasks processes export it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.adapter_record import PendingLoad
from shared.task_metrics import TaskQueueCollector
from shared.task_queue import QUEUE, TaskQueue
from tests.integration.gateway_harness import serve
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer

LOAD = PendingLoad(version=1, source="path")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Of one node whatever the others have: RQ needs one."""
    server = RedisServer()
    server.start()
    yield server
    server.close()


def samples(collector: TaskQueueCollector) -> dict[tuple[str, ...], float]:
    found = [sample for family in collector.collect() for sample in family.samples]
    return {tuple(sample.labels.values()): sample.value for sample in found}


def test_counts_and_age(server: RedisServer) -> None:
    collector, queue = TaskQueueCollector(server.url, looks=True), TaskQueue(server.url, 60)
    assert set(samples(collector).values()) == {0.0}
    for name in ("a", "b"):
        queue.load_adapter(name, LOAD)
    with server.client() as client:
        first = client.lindex(f"rq:queue:{QUEUE}", 0)
        assert isinstance(first, bytes)
        client.hset(f"rq:job:{first.decode()}", "enqueued_at", "2026-01-01T00:00:00.000000Z")
        found = samples(collector)
        assert found["tasks", "waiting"] == 2 and found["tasks", "running"] == 0
        assert found["webhooks", "waiting"] == found["webhooks",] == 0
        assert found["tasks",] > 0, "the first one's, not that of the last one"
        client.hset(f"rq:job:{first.decode()}", "enqueued_at", b"\xffjunk")
        assert samples(collector)["tasks",] == 0, "bytes of somebody else are no error"
    collector.close()
    queue.close()


def test_what_is_not_known_is_not_zero(server: RedisServer) -> None:
    collector = TaskQueueCollector(f"redis://127.0.0.1:{free_port()}", looks=True)
    assert samples(collector) == {}
    other = TaskQueueCollector(server.url, looks=False)
    assert samples(other) == {}, "nobody has looked"
    other.look()
    assert samples(other)["tasks", "waiting"] == 0
    other.close()


async def test_a_gateway_says_it(server: RedisServer) -> None:
    with server.client() as client:
        client.rpush(f"rq:queue:{QUEUE}", "x")
        async with serve(server.url, clean=False) as gateway:
            text = (await gateway.http.get("/metrics")).text
    assert 'ropeway_task_queue_tasks{queue="tasks",state="waiting"} 1.0' in text.splitlines()
    assert 'ropeway_task_queue_oldest_seconds{queue="webhooks"} 0.0' in text.splitlines()
