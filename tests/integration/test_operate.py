"""`ropeway dead` and `ropeway pool` against a real server, and the gateways' sweep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner, Result

from gateway.metrics import GatewayMetrics
from gateway.sweeper import Sweeper
from ropeway import cli
from shared import keys
from shared.connect import connect
from shared.errors import ServiceUnavailableError
from shared.jobs import Lease, Lifetime
from shared.keys import JobId
from shared.protocol import Card, TokenizerBundle
from shared.upkeep import Upkeep
from tests.support.jobs import POOL, budget, check_lane, envelope
from tests.support.redis_topology import raw_client
from tests.support.worker_harness import harness, job


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[Any]:
    client = await raw_client(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
async def upkeep(valkey_url: str) -> AsyncIterator[Upkeep]:
    """A store with a pool of two lanes."""
    commands = connect(valkey_url)
    upkeep = Upkeep(commands)
    card = Card(
        pool=POOL, digest="d", lanes=2, max_model_len=64, vocab_size=100, eos_token_ids=[1], kv_tokens=64
    )  # fmt: skip
    await upkeep.put_card(card, TokenizerBundle(tokenizer_json="{}"))
    yield upkeep
    await commands.aclose()


async def command(url: str, *arguments: str) -> Result:
    def call() -> Result:
        return CliRunner().invoke(cli.app, [*arguments, "--redis", url], env={"COLUMNS": "250", "NO_COLOR": "1"})

    return await asyncio.to_thread(call)


async def bury(upkeep: Upkeep, lane: int = 0) -> str:
    dead = envelope(lane=lane, prompt=5)
    await upkeep.submit(dead)
    for number in range(6):
        await upkeep.pull(POOL, lane, f"w{number}", budget(idle=True), Lease(lease_ms=0, max_attempts=2))
    return dead.id


async def test_dead_letters_are_listed_shown_retried_and_purged(upkeep: Upkeep, valkey_url: str, client: Any) -> None:
    assert "no dead letters" in (await command(valkey_url, "dead", "list")).output
    first, second, third = [await bury(upkeep, lane) for lane in (0, 1, 1)]
    table = (await command(valkey_url, "dead", "list")).output
    assert all(job_id in table for job_id in (first, second, third))
    assert "workers died" in table
    listed = json.loads((await command(valkey_url, "dead", "list", "--json", "--pool", POOL)).output)
    assert {letter["job_id"] for letter in listed} == {first, second, third}
    assert {letter["code"] for letter in listed} == {"job_failed"}
    shown = json.loads((await command(valkey_url, "dead", "show", first)).output)
    assert shown["envelope"]["prompt_tokens"] == 5
    assert "prompt_token_ids" not in shown["envelope"]
    shown = json.loads((await command(valkey_url, "dead", "show", first, "--prompt")).output)
    assert shown["envelope"]["prompt_token_ids"] == [1, 2, 3, 4, 5]

    retried = await command(valkey_url, "dead", "retry", first)
    assert retried.exit_code == 0
    old, _, new = retried.output.strip().partition(" -> ")
    assert old == first
    assert (await upkeep.status(new))[0] == "queued"
    await check_lane(client, [first, new])

    assert "purged 1" in (await command(valkey_url, "dead", "purge", second)).output
    assert "purged 1" in (await command(valkey_url, "dead", "purge", "--pool", POOL)).output
    assert json.loads((await command(valkey_url, "dead", "list", "--json")).output) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["dead", "show", f"{POOL}.0.{'0' * 32}"], 1, "no dead letter"),
        (["dead", "show", "../../etc"], 1, "no job has this id"),
        (["dead", "retry", f"{POOL}.0.{'0' * 32}"], 1, "no dead letter"),
        (["dead", "purge"], 2, "name the jobs"),
        (["dead", "purge", "x", "--pool", POOL], 2, "name the jobs"),
        (["dead", "list", "--pool", "nope"], 1, "there is no pool nope"),
        (["pool", "pause", "nope"], 1, "there is no pool nope"),
    ],
)
async def test_what_is_not_there_is_said_in_one_line(
    upkeep: Upkeep, valkey_url: str, arguments: list[str], code: int, words: str
) -> None:
    result = await command(valkey_url, *arguments)
    assert result.exit_code == code
    assert words in result.output
    assert "Traceback" not in result.output


async def test_redis_away_is_said_in_one_line() -> None:
    result = await command("redis://127.0.0.1:1/0", "pool", "list")
    assert result.exit_code == 1
    assert "Redis is not available" in result.output


async def test_pools_are_listed_paused_and_unpaused(upkeep: Upkeep, valkey_url: str) -> None:
    await upkeep.submit(envelope(lane=1))
    assert (await command(valkey_url, "pool", "pause", POOL)).exit_code == 0
    (state,) = json.loads((await command(valkey_url, "pool", "list", "--json")).output)
    assert (state["name"], state["paused"], state["workers"], state["load"]["queued_jobs"]) == (POOL, True, 0, 1)
    assert "paused" in (await command(valkey_url, "pool", "list")).output
    assert (await command(valkey_url, "pool", "unpause", POOL)).exit_code == 0
    assert not await upkeep.paused(POOL)


async def test_a_paused_pool_finishes_what_runs_and_takes_nothing_new(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker(sim_step_ms=5, heartbeat_s=0.2)
        running = await h.submit(job(1, max_tokens=100))
        await running.tokens(3)
        upkeep = Upkeep(h.client)
        await upkeep.pause(running.job_id.partition(".")[0])
        await asyncio.sleep(0.3)
        waiting = job(2, max_tokens=5)
        follower = await h.submit(waiting)
        await running.end()
        await asyncio.sleep(0.5)
        assert (await h.store.status(waiting.id))[0] == "queued"
        # A worker that starts now learns it from its first heartbeat.
        await h.worker(heartbeat_s=0.2)
        await asyncio.sleep(0.5)
        assert (await h.store.status(waiting.id))[0] == "queued"
        await upkeep.unpause(running.job_id.partition(".")[0])
        await follower.end()
        assert (await h.result(waiting.id)).status == "completed"


async def test_the_sweep_ends_late_jobs_and_puts_lost_ones_back(upkeep: Upkeep, client: Any) -> None:
    late, lost = envelope(lane=1), envelope(lane=0)
    await upkeep.submit(late, lifetime=Lifetime(deadline_s=0.05))
    await upkeep.submit(lost)
    await client.delete(keys.queue(POOL, 0, "normal", keys.bucket_of("default")))
    await asyncio.sleep(0.1)
    metrics = GatewayMetrics()
    sweepers = [Sweeper(upkeep, metrics, 60.0) for _ in range(3)]
    await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))
    assert (await upkeep.status(late.id))[0] == "expired"
    await check_lane(client, [late.id], lane=1)
    await check_lane(client, [lost.id], lane=0)
    text = generate_latest(metrics.registry).decode()
    assert 'ropeway_gateway_swept_jobs_total{status="expired"} 1.0' in text
    assert 'ropeway_gateway_swept_jobs_total{status="restored"} 1.0' in text


async def test_a_broken_lane_does_not_stop_the_sweep(upkeep: Upkeep, client: Any) -> None:
    late, beside = envelope(lane=1), envelope(lane=0, job_class="batch")
    for job_ in (late, beside):
        await upkeep.submit(job_, lifetime=Lifetime(deadline_s=0.05))
    await client.set(keys.queue(POOL, 0, "normal", 0), b"not a stream")
    foreign = JobId.new(POOL, 0)
    await client.hset(keys.job(foreign), mapping={"stream": b"q:normal:0", "status": b"queued"})
    await asyncio.sleep(0.1)
    await Sweeper(upkeep, GatewayMetrics(), 60.0).sweep()
    assert (await upkeep.status(late.id))[0] == "expired"
    assert (await upkeep.status(beside.id))[0] == "expired", "nor is a broken stream the end of its lane"


@pytest.mark.parametrize("where", ["recount", "forget_dead", "sweep", "restore"])
async def test_an_error_in_any_step_of_the_sweep_stops_no_other(
    upkeep: Upkeep, client: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As when a node is away, or refuses a command, in one lane only."""
    late, counted, left = (envelope(lane=lane) for lane in (1, 1, 1))
    await upkeep.submit(late, lifetime=Lifetime(deadline_s=0.05))
    await upkeep.submit(counted)
    await upkeep.submit(left)
    await upkeep.pull(POOL, 1, "dead", budget(0), Lease())
    await client.hset(keys.stats(POOL, 1), "queued_jobs", 7)
    stream = keys.queue(POOL, 1, "normal", keys.bucket_of("default"))
    await client.xgroup_createconsumer(stream, keys.GROUP, "dead")
    await asyncio.sleep(0.1)
    run = upkeep._run

    async def fails(call: Any) -> Any:
        if call.script is not None and call.script.name == where and call.lane in (f"{POOL}.0", "x"):
            raise ServiceUnavailableError("this node is away")
        return await run(call)

    if where == "restore":
        monkeypatch.setattr(upkeep, "job_ids", _away)
    monkeypatch.setattr(upkeep, "_run", fails)
    with pytest.raises(ServiceUnavailableError) if where != "restore" else nullcontext():
        await Sweeper(upkeep, GatewayMetrics(), 60.0).sweep()
    assert (await upkeep.status(late.id))[0] == "expired"
    assert (await upkeep.lane_load(POOL, 1)).queued_jobs == 2
    assert await client.xinfo_consumers(stream, keys.GROUP) == []


async def _away(pool: str) -> AsyncIterator[str]:
    raise ServiceUnavailableError("this node is away")
    yield pool
