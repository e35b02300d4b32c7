"""The whole of it as real processes: gateways, a tasks process, workers with the simulated engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropeway.client import APIError, Client
from shared.settings import TasksSettings
from shared.task_queue import tasks_url
from tests.support.adapter_tasks import tasks
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.redis_topology import ClusterServers
from tests.support.stack import Stack
from tests.support.stored_adapters import write_adapter

pytestmark = pytest.mark.slow


class OneWorker(Stack):
    """With the port of its first worker's metrics."""

    worker_port = 0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[OneWorker]:
    """A gateway, a worker with two slots and a tasks process."""
    shared: dict[str, Any] = {"adapter_store": str(tmp_path / "store")}
    worker = {"engine": "sim", "enable_lora": "true", "max_loras": 2, "sim_step_ms": 1, **shared}
    with OneWorker(**worker) as stack, tasks(stack.redis.url, tmp_path):
        stack.start_gateway(**shared)
        _, stack.worker_port = stack.start_worker()
        stack.wait_ready()
        yield stack


def text(client: Client, model: str) -> str:
    job = client.submit("What is a ropeway?", model=model, max_tokens=12, temperature=0, seed=1)
    return client.wait(job.id, timeout=60).text


def test_from_upload_to_unload_over_two_gateways(stack: Stack, tmp_path: Path) -> None:
    port = free_port()
    stack.start_gateway(port, adapter_store=str(tmp_path / "store"))
    with Client(stack.url) as client, Client(f"http://127.0.0.1:{port}") as other:
        for number in range(4):
            client.load_adapter(
                f"org/a{number}", write_adapter(tmp_path / str(number), number), pin=number == 0, wait_s=60
            )
        _until(f"http://127.0.0.1:{port}")
        base = text(client, "sim")
        texts = [text(each, f"org/a{number}") for number in range(4) for each in (client, other)]
        assert texts[::2] == texts[1::2] and len({base, *texts}) == 5, "each adapter has a text of its own"
        client.load_adapter("org/a1", write_adapter(tmp_path / "new", 9), replace=True, wait_s=60)
        assert text(other, "org/a1") == text(client, "org/a1") not in texts, "no gateway knows the old one"
        assert client.adapter("org/a0").state == "resident"
        assert client.models()[0] == "sim" and "org/a3" in other.models()
        running = client.submit("Go on.", model="org/a2", max_tokens=400, temperature=0, ignore_eos=True)
        for _ in client.events(running.id):
            break
        assert client.unload_adapter("org/a2") == 1
        with pytest.raises(APIError) as refused:
            text(other, "org/a2")
        assert refused.value.code == "model_not_found"
        assert other.adapter("org/a2").state == "draining"
        assert client.wait(running.id, timeout=60).status == "completed"
        with pytest.raises(APIError):
            other.adapter("org/a2")
        client.load_adapter("org/a2", write_adapter(tmp_path / "2", 2), wait_s=60)
        assert text(other, "org/a2") == texts[4]


def test_fifty_first_requests_at_once_have_an_adapter_read_once(stack: OneWorker, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is a ropeway?"}]

    def asked(model: str) -> str:
        answer = client.chat(question, model=model, max_tokens=12, temperature=0, seed=1)
        return str(answer["choices"][0]["message"]["content"])

    with Client(stack.url) as client, ThreadPoolExecutor(50) as threads:
        client.load_adapter("sql", write_adapter(tmp_path / "a", 1), wait_s=60)
        assert client.adapter("sql").state == "registered", "nobody has asked for it yet"
        texts = list(threads.map(asked, ["sql"] * 50))
        assert len(set(texts)) == 1 and texts[0] != asked("sim")
    metrics = httpx.get(f"http://127.0.0.1:{stack.worker_port}/metrics", timeout=60).text
    (loads,) = (line for line in metrics.splitlines() if line.startswith("ropeway_adapter_loads_total"))
    assert float(loads.split()[-1]) == 1


def test_a_worker_that_is_killed_leaves_its_jobs_their_content(stack: Stack, tmp_path: Path) -> None:
    with Client(stack.url) as client:
        client.load_adapter("sql", write_adapter(tmp_path / "a", 1), wait_s=60)
        wanted = client.wait(_long(client).id, timeout=60).text
        job = _long(client)
        for event in client.events(job.id):
            if event.kind == "tokens":
                break
        client.load_adapter("sql", write_adapter(tmp_path / "b", 2), replace=True, wait_s=60)
        stack.processes[-1].stop(signal.SIGKILL)
        stack.start_worker()
        assert client.wait(job.id, timeout=120).text == wanted


def _long(client: Client) -> Any:
    return client.submit("Go on.", model="sql", max_tokens=300, temperature=0, seed=1, ignore_eos=True)


def _until(url: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(url)


def test_a_cluster_for_jobs_and_a_server_for_tasks(tmp_path: Path) -> None:
    single = RedisServer("valkey")
    single.start()
    try:
        with ClusterServers() as cluster:
            urls = {"redis_url": cluster.url, "tasks_redis_url": single.url, "adapter_store": str(tmp_path / "store")}
            assert tasks_url(TasksSettings(**urls)) == single.url  # type: ignore[arg-type]
            stack = Stack(engine="sim", enable_lora="true", **urls)
            try:
                with tasks(cluster.url, tmp_path, tasks_redis_url=single.url):
                    stack.start_gateway(**urls)
                    stack.start_worker()
                    stack.wait_ready()
                    with Client(stack.url) as client:
                        client.load_adapter("sql", write_adapter(tmp_path / "a", 1), wait_s=60)
                        assert text(client, "sql") != text(client, "sim")
                        assert client.unload_adapter("sql") == 0
            finally:
                for process in stack.processes:
                    process.stop(signal.SIGKILL)
    finally:
        single.close()
