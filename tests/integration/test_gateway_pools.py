"""`/v1/pools`: the figures that scale a pool, and what they say when something is missing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway import catalogue, load
from shared.protocol import WorkerInfo
from tests.integration.gateway_harness import Gateway, completion, running, serve
from tests.unit.gateway import support

LOAD = f"/v1/pools/{support.MODEL}/load"


async def submit(gateway: Gateway, **more: Any) -> str:
    job = {"kind": "completion", "body": completion(max_tokens=20), **more}
    answer = await gateway.http.post("/v1/jobs", json=job)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def state(gateway: Gateway, **query: Any) -> dict[str, Any]:
    answer = await gateway.http.get(LOAD, params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_job_is_counted_from_submit_to_its_end(redis_url: str) -> None:
    async with serve(redis_url) as gateway:
        idle = await state(gateway)
        assert (idle["queued_jobs"], idle["running_jobs"], idle["needed_workers"]) == (0, 0, 0)
        await submit(gateway, **{"class": "batch"})
        queued = await state(gateway)
        assert queued["queued_jobs"] == queued["classes"]["batch"]["queued_jobs"] == 1
        assert queued["classes"]["normal"]["queued_jobs"] == 0
        assert queued["needed_workers"] > 0
        assert (queued["suggested_replicas"], queued["workers"]["ready"]) == (1, 0)
        job = await gateway.worker.pull()
        busy = await state(gateway)
        # The queue is empty, and yet the pool must not lose its worker.
        assert (busy["queued_jobs"], busy["running_jobs"], busy["suggested_replicas"]) == (0, 1, 1)
        assert busy["running_tokens"] == busy["classes"]["batch"]["running_tokens"] == queued["queued_tokens"]
        await job.answer("x")
        assert (await state(gateway))["needed_workers"] == 0


async def test_the_caller_may_say_what_a_worker_takes_at_once(valkey_url: str) -> None:
    async with serve(valkey_url) as gateway:
        jobs = [await submit(gateway) for _ in range(6)]
        assert (await state(gateway, jobs_per_worker=2))["needed_workers"] == 3
        info = WorkerInfo(owner="w", kv_tokens=2048, max_num_seqs=3, running=1)
        await gateway.store.heartbeat(support.MODEL, info, 15_000)
        said = await state(gateway)
        assert said["needed_workers"] == 2
        assert said["workers"] == {"ready": 1, "busy": 1, "draining": 0}
        await gateway.store.leave(support.MODEL, "w")
        assert (await state(gateway))["needed_workers"] == 2, "what it said is remembered"
        refused = await gateway.http.get(LOAD, params={"jobs_per_worker": 0})
        assert refused.status_code == 400
        for job in jobs:
            await gateway.http.post(f"/v1/jobs/{job}/cancel")


async def test_a_pool_that_was_never_served_asks_for_a_worker(valkey_url: str) -> None:
    async with serve(valkey_url, card=False, pools=[support.MODEL]) as gateway:
        new = await state(gateway)
        assert (new["known"], new["queued_jobs"], new["suggested_replicas"]) == (False, 0, 1)
        assert (await gateway.http.get("/ready")).status_code == 200
        early = await gateway.http.post("/v1/completions", json=completion())
        assert early.status_code == 503 and int(early.headers["retry-after"]) >= 1
        assert (await gateway.http.post("/v1/completions", json=completion(model="other"))).status_code == 404
        listed = (await gateway.http.get("/v1/pools")).json()["data"]
        assert [pool["pool"] for pool in listed] == [support.MODEL]
        assert (await gateway.http.get("/v1/pools/a%2Fb/load")).status_code == 404
        await gateway.store.put_card(support.card(), support.bundle())
        async with asyncio.timeout(20):
            while not (await state(gateway))["known"]:
                await asyncio.sleep(0.05)
        assert (await state(gateway))["needed_workers"] == 0


async def test_a_paused_pool_asks_for_no_more_workers(valkey_url: str) -> None:
    async with serve(valkey_url) as gateway:
        job = await submit(gateway)
        await gateway.store._ask("SET", f"rw:{{{support.MODEL}}}:paused", 1)
        paused = await state(gateway)
        assert (paused["paused"], paused["queued_jobs"], paused["needed_workers"]) == (True, 1, 0)
        await gateway.store._ask("DEL", f"rw:{{{support.MODEL}}}:paused")
        await gateway.http.post(f"/v1/jobs/{job}/cancel")


async def test_without_redis_the_answer_is_an_error_and_no_sample_is_a_zero(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = "redis://127.0.0.1:1/0"
    async with running(away, pools=[support.MODEL]) as (url, _), httpx.AsyncClient(base_url=url, timeout=30) as http:
        answer = await http.get(LOAD)
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert samples((await http.get("/metrics")).text) == {}
    monkeypatch.setattr(load, "LOOK_S", 0.02)
    async with serve(valkey_url) as gateway:
        async with asyncio.timeout(20):
            while not samples((await gateway.http.get("/metrics")).text):
                await asyncio.sleep(0.02)
        metrics = samples((await gateway.http.get("/metrics")).text)
        assert metrics[f'ropeway_queued_jobs{{class="high",pool="{support.MODEL}"}}'] == 0
        assert metrics[f'ropeway_needed_workers{{pool="{support.MODEL}"}}'] == 0
        seen = gateway.services.pools.loads.of(support.MODEL)
        monkeypatch.setattr(load, "LOOK_S", 1000.0)
        await asyncio.sleep(0.1)
        seen.seen_at -= 60
        assert samples((await gateway.http.get("/metrics")).text) == {}, "what is old is not shown"


def samples(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines()]
    wanted = ("ropeway_queued_jobs{", "ropeway_needed_workers{")
    return {name: float(value) for name, _, value in lines if name.startswith(wanted)}


async def test_the_key_of_an_autoscaler_opens_loads_and_nothing_else(valkey_url: str) -> None:
    async with serve(valkey_url, api_keys=["user"], metrics_key="scaler") as gateway:

        async def ask(path: str, key: str | None, method: str = "GET") -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await gateway.http.request(method, path, headers=headers)).status_code

        assert await ask(LOAD, "scaler") == await ask("/v1/pools", "scaler") == await ask(LOAD, "user") == 200
        assert await ask(LOAD, None) == await ask(LOAD, "wrong") == 401
        assert await ask("/metrics", "scaler") == 200
        assert await ask("/v1/models", "scaler") == await ask("/v1/jobs/x", "scaler") == 403
        assert await ask("/v1/jobs", "scaler", "POST") == await ask("/v1/adapters/x", "scaler", "DELETE") == 403
        assert await ask(LOAD, "scaler", "POST") == 405
        assert await ask("/v1/poolsx", "scaler") == 404


async def test_a_pool_is_known_at_once(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right after the gateway looked, and without another look for names that stay unknown."""
    monkeypatch.setattr(catalogue, "MISS_REFRESH_S", 3600.0)
    async with serve(valkey_url, card=False) as gateway:
        known = gateway.services.catalogue
        await known.refresh()
        assert (await gateway.http.post("/v1/completions", json=completion())).status_code == 404
        refreshed = known._refreshed
        await gateway.store.put_card(support.card(), support.bundle())
        job = {"kind": "completion", "body": completion(max_tokens=2)}
        assert (await gateway.http.post("/v1/jobs", json=job)).status_code == 202
        assert known._refreshed > refreshed
        refreshed = known._refreshed
        answer = await gateway.http.post("/v1/completions", json={**completion(), "model": "another"})
        assert (answer.status_code, known._refreshed) == (404, refreshed)
        await (await gateway.worker.pull()).answer("x")
