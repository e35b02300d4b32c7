"""Whether a flood of one tenant, or a backlog of a lower class, makes others wait. SimEngine.

    python -m benchmarks.fairness [--quick] [--json FILE]

Tenants: one lane, one worker. One tenant queues 1,000 jobs; while they keep the batch full, another sends 20 at once.
Its median wait, from submit until the engine begins, against that of the same 20 on an idle pool. The aim is at most
twice that plus one job's time: `small_tenant_wait_ratio`, the wait less one job's time over the wait on the idle pool,
is at most 2.

Classes: 5,000 jobs of the class batch are queued and the batch is full of them. The time to the first token of streams
of the normal class, one after the other over HTTP, against that on an idle pool: `interactive_ttft_ratio`, at most 1.5.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer

from benchmarks.common import report
from shared import keys
from shared.connect import connect
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import Envelope, JobClass, Result, decode
from shared.sampling import SamplingParams
from tests.support.stack import Stack

MODEL = "sim"
STEP_MS = 10.0
#: Tokens of the tenants' jobs.
TOKENS = 64
FLOOD, SMALL = 1000, 20
BACKLOG = 5000
_SUBMITTERS = 32


def _job(tenant: str, number: int, *, tokens: int = TOKENS, job_class: JobClass = "normal", lane: int = 0) -> Envelope:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    prompt = [(number + at) % 400 for at in range(32)]
    job_id = str(JobId.new(MODEL, lane))
    return Envelope(
        id=job_id,
        tenant=tenant,
        model=MODEL,
        prompt_token_ids=prompt,
        sampling=sampling,
        job_class=job_class,
        flush_ms=100,
    )


async def submit(store: JobStore, jobs: Sequence[Envelope]) -> None:
    """Queue jobs, some at a time."""
    left = iter(jobs)

    async def submitter() -> None:
        for job in left:
            await store.submit(job)

    await asyncio.gather(*(submitter() for _ in range(_SUBMITTERS)))


async def until_running(store: JobStore, lanes: int, jobs: int) -> None:
    """Until so many jobs run."""
    while True:
        if (await store.pool_load(MODEL, lanes)).running_jobs >= jobs:
            return
        await asyncio.sleep(0.02)


async def waits(store: JobStore, jobs: Sequence[Envelope]) -> tuple[list[float], list[float]]:
    """Milliseconds that jobs waited, and that they ran, once all have ended."""
    timings = []
    for job in jobs:
        result = None
        while result is None:
            await asyncio.sleep(0.05)
            result = (await store.get(job.id)).result
        timings.append(decode(result, Result).timings)
    return [timing.queue_ms for timing in timings], [timing.run_ms for timing in timings]


async def tenants(url: str, seqs: int) -> dict[str, float]:
    """A flood of one tenant and a few jobs of another, in one lane."""
    client = connect(url)
    store = JobStore(client)
    big, small = "flood", next(name for name in map(str, range(100)) if keys.bucket_of(name) != keys.bucket_of("flood"))

    async def send_small() -> tuple[float, float]:
        jobs = [_job(small, number) for number in range(SMALL)]
        await submit(store, jobs)
        waited, ran = await waits(store, jobs)
        return statistics.median(waited), statistics.median(ran)

    idle = [await send_small() for _ in range(5)]
    idle_wait = statistics.median(wait for wait, _ in idle)
    flood = [_job(big, number) for number in range(FLOOD)]
    await submit(store, flood)
    await until_running(store, 1, seqs)
    await asyncio.sleep(0.3)
    wait, ran = await send_small()
    left = (await store.pool_load(MODEL, 1)).queued_jobs
    await client.aclose()
    if not left:
        raise RuntimeError("the flood was over before the small tenant was")
    return {
        "idle_wait_ms": idle_wait,
        "job_ms": ran,
        "small_tenant_wait_ms": wait,
        "small_tenant_wait_ratio": max(0.0, wait - ran) / idle_wait,
    }


async def first_tokens(url: str, count: int) -> float:
    """Median milliseconds to the first token of streams, one after the other."""
    body = {"model": MODEL, "prompt": "A cable car", "max_tokens": 4, "temperature": 0, "stream": True}
    times = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for _ in range(count):
            began = time.perf_counter()
            async with http.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_raw():
                    times.append(time.perf_counter() - began)
                    break
    return 1e3 * statistics.median(times)


async def classes(url: str, redis_url: str, seqs: int, lanes: int, count: int) -> dict[str, float]:
    """Interactive streams beside a backlog of batch jobs."""
    client = connect(redis_url)
    store = JobStore(client)
    await first_tokens(url, 5)
    idle = await first_tokens(url, count)
    backlog = [_job("batch", n, tokens=1000, job_class="batch", lane=n % lanes) for n in range(BACKLOG)]
    await submit(store, backlog)
    await until_running(store, lanes, seqs)
    busy = await first_tokens(url, count)
    load = await store.pool_load(MODEL, lanes)
    await client.aclose()
    if load.running_jobs < seqs:
        raise RuntimeError("the batch was not full")
    return {
        "idle_ttft_ms": idle,
        "interactive_ttft_ms": busy,
        "interactive_ttft_ratio": busy / idle,
        "batch_jobs_queued": load.queued_jobs,
    }


def main(
    quick: Annotated[bool, typer.Option(help="fewer interactive streams")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Measure and print."""
    seqs, lanes = 64, 4
    figures: dict[str, float] = {}
    with Stack(engine="sim", sim_step_ms=STEP_MS, max_num_seqs=seqs, lanes=1) as stack:
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        figures |= asyncio.run(tenants(stack.redis.url, seqs))
    with Stack(engine="sim", sim_step_ms=STEP_MS, max_num_seqs=seqs, lanes=lanes) as stack:
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        figures |= asyncio.run(classes(stack.url, stack.redis.url, seqs, lanes, 30 if quick else 100))
    report("fairness", figures, dtype="sim", model="SimEngine", json_file=json_file)


if __name__ == "__main__":
    typer.run(main)
