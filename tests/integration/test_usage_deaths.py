"""Usage with real processes: workers and a gateway that are killed cost no count and add none."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from shared.api_keys import ApiKey
from tests.support.keys import access_to, bearer
from tests.support.stack import Stack

JOBS, TOKENS = 12, 60


async def made(url: str) -> tuple[str, ApiKey]:
    async with access_to(url) as access:
        return await access.create_key("acme", ["inference"])


def order(number: int) -> dict[str, Any]:
    body = {"model": "sim", "prompt": f"cabin {number}", "max_tokens": TOKENS, "ignore_eos": True}
    return {"kind": "completion", "body": body}


def jobs_of(http: httpx.Client, ids: list[str]) -> list[dict[str, Any]]:
    return [http.get(f"/v1/jobs/{job_id}").raise_for_status().json() for job_id in ids]


def until(http: httpx.Client, ids: list[str], status: str, least: int) -> None:
    """Wait until so many jobs are in a state."""
    limit = time.monotonic() + 120
    while sum(job["status"] == status for job in jobs_of(http, ids)) < least:
        assert time.monotonic() < limit, [job["status"] for job in jobs_of(http, ids)]
        time.sleep(0.05)


def test_every_job_is_counted_once_whoever_dies() -> None:
    with Stack(clean=True, engine="sim", sim_step_ms=30, max_num_seqs=6, lease_s=1.0, heartbeat_s=0.5) as stack:
        first = stack.start_gateway(require_keys="true", pools='["sim"]')
        worker, _ = stack.start_worker(pool="sim")
        stack.wait_ready()
        key, record = asyncio.run(made(stack.redis.url))
        with httpx.Client(base_url=stack.url, headers=bearer(key), timeout=60) as http:
            answer = http.post("/v1/jobs", json={"jobs": [order(n) for n in range(JOBS)]}).raise_for_status()
            ids = [job["id"] for job in answer.json()["data"]]
            until(http, ids, "running", 3)
            worker.stop(signal.SIGKILL)
            first.stop(signal.SIGKILL)
            stack.processes.clear()
            stack.start_worker(pool="sim")
            stack.start_gateway(require_keys="true", pools='["sim"]')
            stack.wait_ready()
            until(http, ids, "completed", JOBS)
            shown = [job["usage"] for job in jobs_of(http, ids)]
            # Midnight may have passed meanwhile.
            yesterday = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
            rows = http.get("/v1/usage", params={"start": yesterday}).raise_for_status().json()["data"]
        assert {(row["tenant"], row["key"], row["model"]) for row in rows} == {("acme", record.id, "sim")}
        assert sum(row["requests"] for row in rows) == JOBS
        for tokens in ("prompt_tokens", "completion_tokens"):
            assert sum(row[tokens] for row in rows) == sum(usage[tokens] for usage in shown)
        assert sum(usage["completion_tokens"] for usage in shown) == JOBS * TOKENS
