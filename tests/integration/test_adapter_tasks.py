"""Background tasks as a real process: retries, deaths in the middle, tasks of others, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from shared.adapter_record import AdapterRecord, PendingLoad
from shared.adapters import Adapters
from shared.calls import AsyncClient
from shared.connect import connect, connect_sync
from shared.jobstore import JobStore
from shared.task_queue import QUEUE, TaskQueue
from tests.integration.test_access import ENCODED, with_users
from tests.support.adapter_tasks import TARGETS, TasksProcess, tasks, write_adapter
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub
from tests.support.jobs import envelope
from tests.support.redis_server import RedisServer, binary
from tests.support.redis_topology import SentinelServers
from tests.support.stack import ROOT
from tests.unit.gateway import support

MODEL = support.MODEL


@pytest.fixture
async def commands(valkey_url: str) -> AsyncIterator[AsyncClient]:
    client = connect(valkey_url)
    await prepare(client)
    yield client
    await client.aclose()


@pytest.fixture
def adapters(commands: AsyncClient) -> Adapters:
    return Adapters(commands)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


async def prepare(client: AsyncClient) -> None:
    store = JobStore(client)
    await store.put_card(support.card(max_lora_rank=16), support.bundle())
    await store.put_targets(MODEL, TARGETS)


async def ask(adapters: Adapters, url: str, source: str, name: str = "x") -> int:
    """Ask for a load as a gateway does; answers its version."""
    pending = PendingLoad(version=0, source=source, since_ms=await adapters.clock_ms())
    record, began, _ = await adapters.begin(name, MODEL, pending, replace=True)
    assert began and record.pending is not None
    queue = TaskQueue(url, 600)
    await asyncio.to_thread(queue.load_adapter, name, record.pending)
    queue.close()
    return record.pending.version


async def ended(adapters: Adapters, name: str = "x", seconds: float = 200) -> AdapterRecord:
    """The record once no load is under way."""
    async with asyncio.timeout(seconds):
        while True:
            record = await adapters.find(name)
            if record is not None and record.pending is None:
                return record
            await asyncio.sleep(0.05)


async def until_loading(adapters: Adapters, name: str = "x", version: int = 1) -> None:
    async with asyncio.timeout(60):
        while not await adapters.is_loading(name, version):
            await asyncio.sleep(0.02)


async def test_a_hub_s_commit_is_pinned_and_only_two_files_are_fetched(
    adapters: Adapters, valkey_url: str, tmp_path: Path, hub: FakeHub
) -> None:
    source = write_adapter(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.repos["org/sql"] = {**files, "evil.py": b"raise SystemExit", "adapter_model.bin": b"x"}
    with env(HF_ENDPOINT=hub.url), tasks(valkey_url, tmp_path):
        await ask(adapters, valkey_url, "hf:org/sql@v1")
        record = await ended(adapters)
    assert record.error is None and record.content is not None
    assert record.content.revision == COMMIT and record.source == "hf:org/sql@v1"
    fetched = {path.partition("?")[0].rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert fetched == {"adapter_config.json", "adapter_model.safetensors"}
    assert all(f"/resolve/{COMMIT}/" in path for path in hub.asked if "/resolve/" in path)
    kept = tmp_path / "store" / record.content.identity
    assert sorted(path.name for path in kept.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


async def test_what_the_hub_does_not_have_is_no_reason_to_try_again(
    adapters: Adapters, valkey_url: str, tmp_path: Path, hub: FakeHub
) -> None:
    hub.repos["org/pickle"] = {"adapter_config.json": b"{}", "adapter_model.bin": b"x"}
    hub.repos["org/large"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(2000)}
    with env(HF_ENDPOINT=hub.url), tasks(valkey_url, tmp_path, max_adapter_bytes=1000):
        for name, source, named in (
            ("a", "org/absent", "no such repository"),
            ("b", "org/pickle@nowhere", "no such revision"),
            ("c", "org/pickle", "adapter_model.bin"),
            ("d", "org/large", "max_adapter_bytes"),
        ):
            await ask(adapters, valkey_url, source, name)
            record = await ended(adapters, name)
            assert named in (record.error or ""), record.error
    assert not any("/resolve/" in path for path in hub.asked)


async def test_a_hub_that_is_away_is_asked_again(
    adapters: Adapters, valkey_url: str, tmp_path: Path, hub: FakeHub
) -> None:
    source = write_adapter(tmp_path / "source")
    hub.repos["org/sql"] = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.away = 1_000_000
    with env(HF_ENDPOINT=hub.url), tasks(valkey_url, tmp_path):
        await ask(adapters, valkey_url, "org/sql")
        async with asyncio.timeout(60):
            while (record := await adapters.find("x")) is None or record.pending is None or not record.pending.error:
                await asyncio.sleep(0.05)
        assert record.pending.error == "lora_path: the hub is not available: it answers 503"
        hub.away = 0
        record = await ended(adapters)
    assert record.error is None and record.content is not None


async def test_a_hub_may_not_be_asked_at_all(adapters: Adapters, valkey_url: str, tmp_path: Path) -> None:
    with tasks(valkey_url, tmp_path, adapter_hub=False):
        await ask(adapters, valkey_url, "org/sql")
        assert "adapter_hub" in ((await ended(adapters)).error or "")


async def test_a_killed_process_leaves_no_load_for_ever(adapters: Adapters, valkey_url: str, tmp_path: Path) -> None:
    """It is killed while the hub has not answered yet; the next process takes the load up when its lease is over."""
    with fake_hub() as silent:
        silent.repos["org/sql"] = {}
        hold = slow(silent)
        with env(HF_ENDPOINT=silent.url), tasks(valkey_url, tmp_path) as first:
            version = await ask(adapters, valkey_url, "org/sql")
            await until_loading(adapters)
            horses = psutil.Process(first.popen.pid).children()
            first.stop(signal.SIGKILL)
            gone, alive = psutil.wait_procs(horses, timeout=20)
            assert gone and not alive, "the task's own process ends with it"
        hold.set()
    record = await adapters.find("x")
    assert record is not None and record.pending is not None, "nobody has said anything yet"
    source = write_adapter(tmp_path / "source")
    with fake_hub() as hub:
        hub.repos["org/sql"] = {path.name: path.read_bytes() for path in source.iterdir()}
        with env(HF_ENDPOINT=hub.url), tasks(valkey_url, tmp_path):
            record = await ended(adapters)
    assert record.error is None and record.version == version and record.content is not None


def slow(hub: FakeHub) -> Any:
    """Have a hub keep its answers back until the event is set."""
    hold = threading.Event()
    answer = hub._answer

    def later(request: Any, *, body: bool) -> None:
        hold.wait(60)
        answer(request, body=body)

    hub._answer = later  # type: ignore[method-assign]
    return hold


async def test_a_load_whose_processes_die_again_and_again_is_given_up(
    adapters: Adapters, valkey_url: str, tmp_path: Path
) -> None:
    await adapters.begin("x", MODEL, PendingLoad(version=0, source="/x", since_ms=1, starts=3), replace=False)
    with tasks(valkey_url, tmp_path):
        assert "given up" in ((await ended(adapters)).error or "")


async def test_a_load_that_nobody_queued_is_begun(adapters: Adapters, valkey_url: str, tmp_path: Path) -> None:
    """Its gateway died in between, or the queue's Redis came back empty."""
    source = write_adapter(tmp_path / "roots" / "a")
    await adapters.begin("x", MODEL, PendingLoad(version=0, source=str(source), since_ms=1), replace=False)
    with tasks(valkey_url, tmp_path):
        assert (await ended(adapters)).content is not None


async def test_terminated_it_ends_in_order(valkey_url: str, tmp_path: Path, adapters: Adapters) -> None:
    with tasks(valkey_url, tmp_path) as process:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}") as http:
            assert (await http.get("/health")).json()["status"] == "ok"
            assert "ropeway_adapters_registered" in (await http.get("/metrics")).text
        assert "torch" not in loaded_libraries(process)
        assert psutil.Process(process.popen.pid).memory_info().rss < 150 * 2**20
        assert process.stop() == 0
    assert "Traceback" not in process.log.read_text()


def loaded_libraries(process: TasksProcess) -> str:
    return Path(f"/proc/{process.popen.pid}/maps").read_text()


@pytest.mark.parametrize(
    "task",
    [
        {"data": json.dumps(["os.mkdir", None, ["{marker}"], {}])},
        {"data": json.dumps(["tasks.jobs.configure", None, ["{marker}"], {}])},
        {"data": json.dumps(["tasks.jobs.load_adapter", None, ["x", 1], {}]), "success_callback_name": "os.mkdir"},
        {"data": json.dumps(["tasks.jobs.load_adapter", None, ["x", 1], {}]), "failure_callback_name": "os.mkdir"},
        {"data": json.dumps(["tasks.jobs.load_adapter", None, ["x", 1], {}]), "webhooks": '[{"url": "http://x"}]'},
        {"data": json.dumps(["tasks.jobs.load_adapter", None, ["x", "1"], {}])},
        {"data": json.dumps(["tasks.jobs.load_adapter", {"a": 1}, ["x", 1], {}])},
        {"data": "pickle"},
        {"data": b"\xff\xfe"},
        {"data": json.dumps(7)},
    ],
    ids=str,
)
async def test_tasks_of_somebody_else_are_not_run(
    adapters: Adapters, valkey_url: str, tmp_path: Path, task: dict[str, Any]
) -> None:
    marker = tmp_path / "marker"
    fields = {n: v.replace("{marker}", str(marker)) if isinstance(v, str) else v for n, v in task.items()}
    if fields.get("data") == "pickle":
        fields["data"] = pickle.dumps(Evil(str(marker)))
    client = connect_sync(valkey_url)
    assert isinstance(client, redis.Redis)
    with tasks(valkey_url, tmp_path) as process:
        client.hset("rq:job:evil", mapping={"created_at": "2026-01-01T00:00:00.000000Z", "status": "queued", **fields})
        client.rpush(f"rq:queue:{QUEUE}", "evil")
        source = write_adapter(tmp_path / "roots" / "a")
        await ask(adapters, valkey_url, str(source), "good")
        assert (await ended(adapters, "good")).content is not None, "what comes behind it is served"
        assert client.llen(f"rq:queue:{QUEUE}") == 0
        assert process.popen.poll() is None
    client.close()
    assert not marker.exists()
    assert "passed over" in process.log.read_text()


async def test_scheduled_tasks_that_do_not_read_hold_nothing_up(
    adapters: Adapters, valkey_url: str, tmp_path: Path
) -> None:
    client = connect_sync(valkey_url)
    assert isinstance(client, redis.Redis)
    client.hset("rq:job:evil", mapping={"created_at": "never", "status": "scheduled", "data": b"x"})
    client.zadd(f"rq:scheduled:{QUEUE}", {b"\xff\xfe": 1, "evil": 1, "absent": 1})
    source = write_adapter(tmp_path / "roots" / "a")
    pending = PendingLoad(version=0, source=str(source), since_ms=1)
    await adapters.begin("x", MODEL, pending, replace=False)  # and nobody queues its task: the keeper has to
    with tasks(valkey_url, tmp_path):
        assert (await ended(adapters, seconds=60)).content is not None
    assert client.zcard(f"rq:scheduled:{QUEUE}") == 0
    client.close()


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


async def test_contents_that_nobody_wants_are_deleted_and_others_are_not(
    adapters: Adapters, commands: AsyncClient, valkey_url: str, tmp_path: Path
) -> None:
    with tasks(valkey_url, tmp_path, adapter_retention_s=0, adapter_sweep_s=0.05):
        identities = {}
        for number, name in enumerate(("kept", "flying", "gone")):
            source = write_adapter(tmp_path / "roots" / name, number + 1.0)
            await ask(adapters, valkey_url, str(source), name)
            content = (await ended(adapters, name)).content
            assert content is not None
            identities[name] = content.identity
        job = envelope(adapter_identity=identities["flying"])
        job.id = job.id.replace("pool.", f"{MODEL}.")
        await JobStore(commands).submit(job)
        await adapters.remove("flying")
        await adapters.remove("gone")
        async with asyncio.timeout(30):
            while (tmp_path / "store" / identities["gone"]).exists() or len(await adapters.drained()) > 1:
                await asyncio.sleep(0.05)
        assert [record.name for record in await adapters.drained()] == ["flying"]
        assert (tmp_path / "store" / identities["kept"]).is_dir()
        assert (tmp_path / "store" / identities["flying"]).is_dir(), "a job pins it"
        await JobStore(commands).cancel(job.id)
        async with asyncio.timeout(30):
            while (tmp_path / "store" / identities["flying"]).exists() or await adapters.drained():
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_the_documented_rights_are_enough(kind: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    more = re.search(r"ACL SETUSER ropeway (~rq.+)", page)
    if binary(kind) is None:
        pytest.skip(f"no {kind} server installed")
    server = RedisServer(kind)
    server.start()
    try:
        with with_users([server]):
            admin = redis.Redis(port=server.port, username="admin", password="admin")
            assert more is not None
            admin.execute_command("ACL", "SETUSER", "ropeway", *more[1].split())
            admin.close()
            url = f"redis://ropeway:{ENCODED}@127.0.0.1:{server.port}/0"
            client = connect(url)
            await prepare(client)
            source = write_adapter(tmp_path / "roots" / "a")
            with tasks(url, tmp_path):
                await ask(Adapters(client), url, str(source))
                assert (await ended(Adapters(client))).content is not None
            await client.aclose()
    finally:
        server.close()


async def test_a_cluster_needs_a_place_for_tasks(tmp_path: Path) -> None:
    process = TasksProcess("redis+cluster://127.0.0.1:1", tmp_path / "log", adapter_store=str(tmp_path))
    assert process.popen.wait(120) == os.EX_CONFIG
    assert "ROPEWAY_TASKS_REDIS_URL" in process.log.read_text()


async def test_behind_sentinels(tmp_path: Path) -> None:
    with SentinelServers() as servers:
        client = connect(servers.url)
        await prepare(client)
        source = write_adapter(tmp_path / "roots" / "a")
        with tasks(servers.url, tmp_path):
            await ask(Adapters(client), servers.url, str(source))
            assert (await ended(Adapters(client))).content is not None
        await client.aclose()


class env:
    """Variables of the environment, for processes that are started meanwhile."""

    def __init__(self, **values: str) -> None:
        self._values = values

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._values}
        os.environ.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
