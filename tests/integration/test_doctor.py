"""`ropeway doctor --redis` against real servers: what is well, and what is to be mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ropeway import cli, doctor
from ropeway.doctor_redis import Finding, redis_findings
from ropeway.embedded import EmbeddedRedis, default_data_dir
from shared import keys
from shared.adapters import Adapters
from shared.connect import connect
from shared.jobs import Lease
from shared.protocol import Card, TokenizerBundle, WorkerInfo
from shared.task_queue import TaskQueue
from shared.upkeep import Upkeep
from tests.support.jobs import POOL, budget, envelope
from tests.support.redis_server import RedisServer
from tests.support.redis_topology import ClusterServers


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer(appendonly=True)
    server.start()
    yield server
    server.close()


@pytest.fixture
def url(server: RedisServer) -> str:
    server.flush()
    return server.url


@asynccontextmanager
async def pool(url: str, **fields: Any) -> AsyncIterator[Upkeep]:
    """A pool of two lanes."""
    client = connect(url)
    card = Card(pool=POOL, digest="d" * 64, lanes=2, max_model_len=64, vocab_size=9, eos_token_ids=[1], kv_tokens=64)
    for name, value in fields.items():
        setattr(card, name, value)
    try:
        upkeep = Upkeep(client)
        await upkeep.put_card(card, TokenizerBundle(tokenizer_json="{}"))
        yield upkeep
    finally:
        await client.aclose()


async def look(url: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in await asyncio.to_thread(redis_findings, url)}


def ill(found: dict[str, Finding]) -> dict[str, str]:
    """What is to be done, by name."""
    return {name: finding.mend for name, finding in found.items() if finding.mend is not None}


async def test_a_redis_that_suits_and_a_pool_that_is_well(url: str) -> None:
    async with pool(url) as upkeep:
        await upkeep.heartbeat(POOL, WorkerInfo(owner="w1", version="1.2.0", kv_tokens=64, max_num_seqs=4), 60_000)
        found = await look(url)
    assert ill(found) == {}
    assert found["server"].value.startswith("Valkey ") and "noeviction" in found["memory"].value
    assert "1 ready of 1 workers, 0 jobs wait" in found[f"pool {POOL}"].value


def test_the_command_prints_and_ends_by_what_it_finds(
    url: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda: iter([("python", "3")]))
    well = CliRunner().invoke(cli.app, ["doctor", "--redis", url])
    assert well.exit_code == 0 and "->" not in well.output and well.output.startswith("python")
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            bad = CliRunner().invoke(cli.app, ["doctor"], env={"ROPEWAY_REDIS_URL": url})
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert bad.exit_code == 1 and "-> set maxmemory-policy noeviction" in bad.output
    assert CliRunner().invoke(cli.app, ["doctor", "--redis", "ftp://x"]).exit_code == 2


def test_the_redis_of_serve_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "findings", lambda: iter([("python", "3")]))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("ROPEWAY_REDIS_URL", raising=False)
    assert CliRunner().invoke(cli.app, ["doctor"]).output == "python       3\n"
    with EmbeddedRedis(default_data_dir()) as redis:
        found = CliRunner().invoke(cli.app, ["doctor"])
    assert "in the Redis of `ropeway serve`" in found.stderr and redis.url in found.stdout
    assert found.exit_code == 0 and "persistence  AOF" in found.stdout


def test_redis_is_looked_at_where_no_worker_can_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Iterator[tuple[str, str]]:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
        yield

    monkeypatch.setattr(doctor, "findings", missing)
    result = CliRunner().invoke(cli.app, ["doctor", "--redis", url])
    assert result.exit_code == 0
    assert "torch is not installed" in result.output and "persistence  AOF" in result.output


async def test_what_a_server_lacks(server: RedisServer, url: str) -> None:
    with server.client() as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory", "1100kb")
        try:
            mend = ill(await look(url))
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("appendonly", "yes")
        assert "appendonly yes" in mend["persistence"] and "raise maxmemory" in mend["memory"]
        replica = RedisServer(appendonly=True, extra=["--replicaof", "127.0.0.1", str(server.port)])
        replica.start()
        try:
            assert "it is a replica" in ill(await look(replica.url))["mode"]
        finally:
            replica.close()


async def test_clocks_that_differ(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropeway.doctor_redis._MOST_APART_S", -1.0)
    assert ill(await look(url)).keys() == {"clock"}


async def test_a_redis_that_does_not_answer_and_one_that_may_not_be_asked(server: RedisServer, url: str) -> None:
    found = await look("redis://:secret@127.0.0.1:1/0")
    assert ill(found).keys() == {"server"} and "secret" not in found["redis"].value
    with server.client() as client:
        client.execute_command("ACL SETUSER plain on >pass ~rw:* &rw:* +@all -@dangerous")
        try:
            found = await look(f"redis://plain:pass@127.0.0.1:{server.port}/0")
        finally:
            client.execute_command("ACL DELUSER plain")
    assert ill(found) == {} and "may not ask" in found["server"].value and "clock" in found


async def test_workers_that_do_not_fit(url: str) -> None:
    async with pool(url, max_lora_rank=16) as upkeep:
        for info in (
            WorkerInfo(owner="fits", version="1.10.0", kv_tokens=64, max_loras=4),
            WorkerInfo(owner="old", version="1.9.0", kv_tokens=64, max_loras=4),
            WorkerInfo(owner="small", version="1.10.0", kv_tokens=32, max_loras=4),
            WorkerInfo(owner="plain", version="1.10.0", kv_tokens=64),
            WorkerInfo(owner="late", version="1.10.0", kv_tokens=64, max_loras=4),
        ):
            await upkeep.heartbeat(POOL, info, 60_000)
        await upkeep._ask("ZADD", keys.workers(POOL), await upkeep.now_ms(POOL) - 20_000, "late")
        mend = ill(await look(url))
    assert mend.keys() == {f"worker {owner}" for owner in ("old", "small", "plain", "late")}
    assert "roll-out" in mend["worker old"] and "64 tokens" in mend["worker small"]
    assert "enable_lora" in mend["worker plain"] and "restart it" in mend["worker late"]


async def test_jobs_that_nobody_takes(url: str) -> None:
    async with pool(url) as upkeep:
        await upkeep.submit(envelope())
        assert "start a worker: jobs wait" in ill(await look(url))[f"pool {POOL}"]
        await upkeep.pull(POOL, 0, "w1", budget(), Lease())
        found = await look(url)
        assert "those that died" in ill(found)[f"pool {POOL}"]
        assert "still has 1 jobs" in found["worker w1"].value and "restart it" in ill(found)["worker w1"]
        await upkeep.heartbeat(POOL, WorkerInfo(owner="w1", kv_tokens=64), 60_000)
        assert ill(await look(url)) == {}
        await upkeep.submit(envelope())
        await upkeep.pause(POOL)
        assert "unpause" in ill(await look(url))[f"pool {POOL}"]


async def test_webhooks_that_nobody_sends(url: str) -> None:
    async with pool(url) as upkeep:
        assert "webhooks" not in await look(url)
        job = envelope(callback_url="https://hooks.test/")
        await upkeep.submit(job)
        await upkeep.cancel(job.id)
        found = await look(url)
        assert found["webhooks"].value.startswith("1 are not delivered yet") and found["webhooks"].mend is None
        await upkeep._ask("DEL", keys.outbox(POOL, 0))
        for age_s, tasks, what in ((120, False, "start a tasks process"), (7200, True, "ropeway webhooks list")):
            since = await upkeep.now_ms() - age_s * 1000
            await upkeep._ask("ZADD", keys.webhooks(POOL, 0, "owed"), since, job.id)
            if tasks:
                await Adapters(upkeep._redis).tasks_alive(60.0)
            assert what in ill(await look(url))["webhooks"]


async def test_a_card_of_another_version(url: str) -> None:
    async with pool(url) as upkeep:
        await upkeep._ask("SET", keys.card(POOL), b"\xc1")
        assert "stop its old workers" in ill(await look(url))[f"pool {POOL}"]


async def test_every_node_of_a_cluster_is_looked_at() -> None:
    with ClusterServers() as cluster:
        cluster.flush()
        async with pool(cluster.url) as upkeep:
            await upkeep.submit(envelope(lane=1))
            await upkeep.pull(POOL, 1, "w1", budget(), Lease())
            found = await look(cluster.url)
            single = cluster.servers[0].url
            assert "use redis+cluster://" in ill(await look(single)).get("mode", "")
    assert len([name for name in found if name.startswith("clock ")]) == 3
    assert "those that died" in ill(found)[f"pool {POOL}"] and "still has 1 jobs" in found["worker w1"].value


async def test_background_tasks_that_nobody_runs(url: str) -> None:
    assert "tasks" not in await look(url)
    queue = TaskQueue(url, 60)
    await asyncio.to_thread(queue.run_batch, "batch_x", 0)
    queue.close()
    assert (await look(url))["tasks"] == Finding("tasks", "1 wait, the first for 0 s")
    client = connect(url)

    async def waits_since(moment: str) -> str | None:
        await client.hset("rq:job:batch_x-0", "enqueued_at", moment)
        return ill(await look(url)).get("tasks")

    long_ago = "2020-01-01T00:00:00.000000Z"
    assert "nobody runs them" in (await waits_since(long_ago) or "")
    await Adapters(client).tasks_alive(60)
    assert "more tasks processes" in (await waits_since(long_ago) or "")
    assert await waits_since(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")) is None
    await client.aclose()
