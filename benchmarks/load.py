"""What one gateway process carries, how fast jobs are queued, and what waiting costs. SimEngine.

    python -m benchmarks.load [--quick] [--streams 1000] [--json FILE]

Streams: so many concurrent SSE streams at 10 tokens a second through one gateway, each to its end and none short. The
delivery lag of some of them is measured: from when a subscriber next to Redis hears a frame until the client has its
event. The load generator, the worker and Redis share the machine's cores with the gateway.

Queueing: 10,000 jobs through `JobStore` into one lane with nobody to take them, then pulls from that depth; both
against an empty lane. Requests: answers of one token, over HTTP, at most 32 at a time. Idle: commands per second that a
worker with nothing to do sends.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import redis
import typer
import uvloop

from benchmarks.common import report
from benchmarks.streams import StreamLoad, quantile
from shared.connect import connect
from shared.jobs import Lease, PullBudget
from shared.jobstore import JobStore
from shared.keys import CLASSES, JobId
from shared.protocol import Envelope
from shared.sampling import SamplingParams
from tests.support.stack import Process, Stack

MODEL = "sim"
TOKENS_PER_S = 10
#: Submits under way at the same time.
_SUBMITTERS = 32
_DEPTH = 10_000
#: Jobs per pull.
_PULLED = 8


def stream_figures(streams: int, seconds: float) -> dict[str, float]:
    """Many streams through one gateway."""
    tokens = round(seconds * TOKENS_PER_S)
    with Stack(
        engine="sim", sim_step_ms=1e3 / TOKENS_PER_S, max_num_seqs=streams, max_num_batched_tokens=16_384
    ) as stack:
        gateway = stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        process = psutil.Process(gateway.popen.pid)
        cpu = _cpu_s(process)
        load = StreamLoad(stack.gateway_port, stack.redis.url, MODEL, tokens)
        uvloop.run(load.run(streams))
        used = _cpu_s(process) - cpu
        return {
            "streams": load.complete,
            "events_per_s": load.events / load.seconds,
            "tokens_per_s": load.tokens / load.seconds,
            "delivery_lag_ms_p50": 1e3 * quantile(load.lags, 0.5),
            "delivery_lag_ms_p99": 1e3 * quantile(load.lags, 0.99),
            "gateway_rss_mb": process.memory_info().rss / 2**20,
            "gateway_cpu_us_per_event": 1e6 * used / load.events,
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _envelope(number: int, lane: int = 0) -> Envelope:
    """A job with a prompt of 100 tokens."""
    prompt = [(number + at) % 400 for at in range(100)]
    sampling = SamplingParams(max_tokens=100, seed=number)
    return Envelope(id=str(JobId.new("deep", lane)), model="deep", prompt_token_ids=prompt, sampling=sampling)


async def queue_figures(url: str) -> dict[str, float]:
    """How fast jobs are queued and pulled, empty and deep."""
    client: Any = connect(url)
    store = JobStore(client)
    before = (await client.info("memory"))["used_memory"]
    times: list[float] = []

    async def submitter(numbers: Any) -> None:
        for number in numbers:
            began = time.perf_counter()
            await store.submit(_envelope(number))
            times.append(time.perf_counter() - began)

    numbers = iter(range(_DEPTH))
    began = time.perf_counter()
    await asyncio.gather(*(submitter(numbers) for _ in range(_SUBMITTERS)))
    seconds = time.perf_counter() - began
    held = (await client.info("memory"))["used_memory"] - before
    tenth = _DEPTH // 10
    room = dict.fromkeys(CLASSES, _PULLED)
    budget = PullBudget(room, dict.fromkeys(CLASSES, 10**6), 10**6)
    deep: list[float] = []
    shallow: list[float] = []
    for number in range(50):
        for at in range(_PULLED):
            await store.submit(_envelope(_PULLED * number + at, lane=1))
        shallow.append(await _pull(store, budget, lane=1))
        deep.append(await _pull(store, budget, lane=0))
    await client.aclose()
    return {
        "submit_per_s": _DEPTH / seconds,
        "submit_slowdown": quantile(times[-tenth:], 0.5) / quantile(times[:tenth], 0.5),
        "pull_slowdown": quantile(deep, 0.5) / quantile(shallow, 0.5),
        "pull_ms": 1e3 * quantile(deep, 0.5),
        "bytes_per_queued_job": held / _DEPTH,
    }


async def _pull(store: JobStore, budget: PullBudget, lane: int) -> float:
    """Seconds of one pull."""
    began = time.perf_counter()
    pulled = await store.pull("deep", lane, "loader", budget, Lease(reclaim=False))
    seconds = time.perf_counter() - began
    if len(pulled.jobs) != _PULLED:
        raise RuntimeError(f"a pull gave {len(pulled.jobs)} jobs")
    return seconds


async def request_rate(url: str, count: int) -> float:
    """Answers of one token per second."""
    limits = httpx.Limits(max_connections=32, max_keepalive_connections=32)
    body = {"model": MODEL, "prompt": "A cable car", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:

        async def ask(numbers: Any) -> None:
            for _ in numbers:
                (await http.post("/v1/completions", json=body)).raise_for_status()

        await ask(range(32))
        numbers = iter(range(count))
        began = time.perf_counter()
        await asyncio.gather(*(ask(numbers) for _ in range(32)))
        return count / (time.perf_counter() - began)


def idle_commands(stack: Stack, seconds: float) -> float:
    """Commands per second that one worker sends while there is nothing to do."""
    with stack.redis.client() as client:
        time.sleep(1)
        before = _commands(client)
        time.sleep(seconds)
        return (_commands(client) - before - 1) / seconds


def _commands(client: redis.Redis) -> int:
    """Commands of clients so far; what scripts call is not among them."""
    return int(client.info("stats")["total_commands_processed"])  # type: ignore[index]


def small_figures(quick: bool) -> dict[str, float]:
    """Everything but streams."""
    figures: dict[str, float] = {}
    with Stack(engine="sim", sim_step_ms=0) as stack:
        figures |= asyncio.run(queue_figures(stack.redis.url))
        stack.redis.flush()
        worker, port = stack.start_worker()
        _wait_ready(worker, port)
        figures["idle_worker_commands_per_s"] = idle_commands(stack, 5 if quick else 10)
        gateway = stack.start_gateway()
        stack.wait_ready()
        uvloop.run(request_rate(stack.url, 100))
        process, count = psutil.Process(gateway.popen.pid), 500 if quick else 3000
        cpu = _cpu_s(process)
        figures["requests_per_s"] = uvloop.run(request_rate(stack.url, count))
        figures["gateway_cpu_ms_per_request"] = 1e3 * (_cpu_s(process) - cpu) / (count + 32)
    return figures


def _wait_ready(worker: Process, port: int) -> None:
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            if worker.popen.poll() is not None:
                raise RuntimeError(worker.text()[-2000:]) from None
        time.sleep(0.1)


def main(
    quick: Annotated[bool, typer.Option(help="shorter streams, fewer requests")] = False,
    streams: Annotated[int, typer.Option(help="concurrent streams")] = 1000,
    only: Annotated[str, typer.Option(help="streams, or rest; empty: both")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Measure and print."""
    figures: dict[str, float] = {}
    if only != "rest":
        figures |= stream_figures(streams, 10 if quick else 30)
    if only != "streams":
        figures |= small_figures(quick)
    if any(math.isnan(value) for value in figures.values()):
        raise RuntimeError(f"a figure is missing: {json.dumps(figures)}")
    report("load", figures, dtype="sim", model="SimEngine", json_file=json_file)
    raise typer.Exit(0 if figures.get("streams", streams) == streams else 1)


if __name__ == "__main__":
    typer.run(main)
