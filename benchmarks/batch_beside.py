"""A batch beside interactive streams: does it get done, does anybody wait for it, what does it hold in memory?

    python -m benchmarks.batch_beside [--quick] [--lines 2000] [--tokens 8] [--json FILE]
    python -m benchmarks.batch_beside --engine sim --lines 10000 --kills 8

A gateway, a worker and a tasks process. The official client uploads a file of chats, creates a batch, waits for its end
and fetches what it has written; each custom id must be there once, and no line may have run twice: `jobs_run` is as
many as `lines`. Meanwhile streams of the normal class come one after the other: `interactive_ttft_ratio` is their
median time to the first text beside the batch over that without it, before and behind. `--kills` is how often the tasks
process is killed, at random moments, and another one started. Memory is the most that was seen: of the gateway what it
has resident, of background tasks the proportional share of all their processes together.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import psutil
import typer
from openai import AsyncOpenAI
from openai.types import Batch

from benchmarks.common import MODEL, report
from shared.connect import connect
from shared.jobstore import JobStore
from shared.tasks import cancel_all
from tests.support.adapter_tasks import TasksProcess
from tests.support.stack import Stack

URL: Final = "/v1/chat/completions"
ENDED: Final = ("completed", "failed", "expired", "cancelled")
_LOOK_S: Final = 0.25
#: Seconds between the end of an interactive answer and the next question.
_THINK_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        engine: `auto` for the real model, `sim`.
        lines, tokens: of the batch; tokens of each answer.
        streams: interactive clients at a time.
        alone: their answers without the batch, half before and half behind.
        kills: how often the tasks process is killed, at random moments of `seed`.
        step_tokens: token budget of the worker's steps; None: its default.
    """

    engine: Literal["auto", "sim"] = "auto"
    lines: int = 2000
    tokens: int = 8
    streams: int = 2
    alone: int = 40
    kills: int = 0
    step_tokens: int | None = None
    seed: int = 1

    @property
    def model(self) -> str:
        """The name that requests ask for."""
        return MODEL if self.engine == "auto" else "sim"


@dataclass(slots=True)
class _Memory:
    """Most megabytes seen."""

    gateway: float = 0.0
    tasks: float = 0.0


@dataclass(slots=True)
class Run:
    """Everything that one run needs, and what it has seen."""

    plan: Plan
    stack: Stack
    folder: Path
    client: AsyncOpenAI
    tasks: TasksProcess | None = None
    started: int = 0
    memory: _Memory = field(default_factory=_Memory)

    def start_tasks(self) -> None:
        """A new tasks process; blocks until it is ready."""
        stores = {name: str(self.folder / name) for name in ("files_store", "adapter_store")}
        self.started += 1
        self.tasks = TasksProcess(self.stack.redis.url, self.folder / f"tasks-{self.started}.log", **stores)
        self.tasks.wait_ready()

    def kill_tasks(self) -> None:
        """SIGKILL; whatever it has begun dies with it."""
        if self.tasks is not None:
            self.tasks.stop(signal.SIGKILL)

    async def ended_jobs(self) -> int:
        """How many jobs have ended, ever."""
        connection = connect(self.stack.redis.url)
        try:
            store = JobStore(connection)
            card = await store.get_card(self.plan.model)
            if card is None:
                raise RuntimeError("the pool has no card")
            return (await store.pool_load(self.plan.model, card.lanes)).ended_jobs
        finally:
            await connection.aclose()


def question(number: int) -> list[dict[str, Any]]:
    """A chat of its own for each line."""
    return [
        {"role": "user", "content": f"Ropeway number {number} crosses valley {number % 97}. Name one thing to see."}
    ]


async def first_text_s(run: Run, number: int) -> float:
    """Seconds until an interactive answer shows its first text."""
    began, first = time.perf_counter(), 0.0
    stream: Any = await run.client.chat.completions.create(
        model=run.plan.model,
        messages=question(100_000 + number),  # type: ignore[arg-type]
        max_tokens=16,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if not first and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - began
    if not first:
        raise RuntimeError("an interactive answer has no text")
    return first


async def interactive(run: Run, *, count: int | None = None, until: asyncio.Event | None = None) -> list[float]:
    """Seconds to the first text of answers, some at a time: so many of them, or as many as there are until then."""
    times: list[float] = []
    numbers = iter(range(10**9 if count is None else count))

    async def client() -> None:
        for number in numbers:
            if until is not None and until.is_set():
                return
            times.append(await first_text_s(run, number))
            await asyncio.sleep(_THINK_S)

    await asyncio.gather(*(client() for _ in range(run.plan.streams)))
    return times


async def submit(run: Run) -> Batch:
    """Upload the lines, and create the batch."""
    plan = run.plan
    lines = []
    for number in range(plan.lines):
        body = {"model": plan.model, "messages": question(number), "max_tokens": plan.tokens, "temperature": 0}
        lines.append({"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body | {"ignore_eos": True}})
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = await run.client.files.create(file=("lines.jsonl", data), purpose="batch")
    return await run.client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")


async def finished(run: Run, batch: Batch) -> Batch:
    """The batch once it has ended."""
    while batch.status not in ENDED:
        await asyncio.sleep(_LOOK_S)
        batch = await run.client.batches.retrieve(batch.id)
    return batch


async def further(run: Run, batch: Batch, before: int) -> int:
    """How many lines are done, once that is more than before: somebody is at the batch again."""
    while True:
        counts = (await run.client.batches.retrieve(batch.id)).request_counts
        done = 0 if counts is None else counts.completed + counts.failed
        if done > before or done >= run.plan.lines:
            return done
        await asyncio.sleep(_LOOK_S)


async def disturb(run: Run, batch: Batch) -> int:
    """Kill tasks processes at random moments while the batch runs; answers how many."""
    dice, deaths, before = random.Random(run.plan.seed), 0, 0
    for _ in range(run.plan.kills):
        before = await further(run, batch, before)
        if before >= run.plan.lines:
            break
        await asyncio.sleep(4 * dice.random())
        await asyncio.to_thread(run.kill_tasks)
        deaths += 1
        await asyncio.to_thread(run.start_tasks)
    return deaths


async def custom_ids(run: Run, batch: Batch) -> Counter[str]:
    """How often each custom id is in what the batch has written."""
    found: Counter[str] = Counter()
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            text = (await run.client.files.content(file_id)).text
            found.update(json.loads(line)["custom_id"] for line in text.splitlines())
    return found


async def watch_memory(run: Run, gateway: psutil.Process) -> None:
    """Note the most memory that is seen, until cancelled."""
    while True:
        run.memory.gateway = max(run.memory.gateway, gateway.memory_info().rss / 2**20)
        if run.tasks is not None:
            run.memory.tasks = max(run.memory.tasks, await asyncio.to_thread(_shares, run.tasks.popen.pid))
        await asyncio.sleep(0.5)


def _shares(pid: int) -> float:
    """Megabytes of a process and all beneath it; pages that several have count once."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += each.memory_full_info().pss
    return total / 2**20


@asynccontextmanager
async def system(plan: Plan) -> AsyncIterator[Run]:
    """Everything started and ready; ended in the end."""
    folder = Path(tempfile.mkdtemp(prefix="rw-batch-beside-"))
    try:
        with Stack(engine=plan.engine) as stack:
            stack.start_gateway(files_store=str(folder / "files_store"))
            bounds: dict[str, Any] = {} if plan.step_tokens is None else {"max_num_batched_tokens": plan.step_tokens}
            stack.start_worker(**bounds)
            await asyncio.to_thread(stack.wait_ready)
            async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
                run = Run(plan, stack, folder, client)
                try:
                    await asyncio.to_thread(run.start_tasks)
                    yield run
                finally:
                    run.kill_tasks()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def measure(plan: Plan) -> dict[str, float]:
    """Run it.

    Raises:
        RuntimeError: the batch did not complete, a custom id is not there exactly once, or a line has run twice.
    """
    async with system(plan) as run:
        gateway = psutil.Process(run.stack.processes[0].popen.pid)
        watch = asyncio.create_task(watch_memory(run, gateway))
        try:
            await interactive(run, count=4)  # warm
            alone = await interactive(run, count=plan.alone // 2)
            before = await run.ended_jobs()
            batch = await submit(run)
            began, over = time.perf_counter(), asyncio.Event()
            streams = asyncio.create_task(interactive(run, until=over))
            disturbance = asyncio.create_task(disturb(run, batch))
            try:
                batch = await finished(run, batch)
                seconds = time.perf_counter() - began
                deaths = await disturbance
            finally:
                over.set()
                beside = await streams
                await cancel_all([disturbance])
            ran = await run.ended_jobs() - before - len(beside)
            alone += await interactive(run, count=plan.alone - plan.alone // 2)
            found = await custom_ids(run, batch)
        finally:
            await cancel_all([watch])
    if ran != plan.lines:
        raise RuntimeError(f"{ran} jobs have run for {plan.lines} lines")
    expected = Counter(f"line-{number}" for number in range(plan.lines))
    if batch.status != "completed" or found != expected:
        missing, twice = expected - found, found - expected
        raise RuntimeError(f"{batch.status}: {missing.total()} lines are missing, {twice.total()} are there twice")
    counts = batch.request_counts
    return {
        "lines": plan.lines,
        "failed_lines": counts.failed if counts is not None else 0,
        "lines_per_s": plan.lines / seconds,
        "batch_s": seconds,
        "jobs_run": ran,
        "deaths": deaths,
        "streams_beside": len(beside),
        "alone_ttft_ms": 1e3 * statistics.median(alone),
        "interactive_ttft_ms": 1e3 * statistics.median(beside),
        "interactive_ttft_ratio": statistics.median(beside) / statistics.median(alone),
        "interactive_ttft_ms_max": 1e3 * max(beside),
        "gateway_rss_mb": run.memory.gateway,
        "tasks_mb": run.memory.tasks,
    }


def main(
    quick: Annotated[bool, typer.Option(help="few lines")] = False,
    engine: Annotated[str, typer.Option(help="auto: the real model; sim")] = "auto",
    lines: Annotated[int, typer.Option(help="lines of the batch")] = 2000,
    tokens: Annotated[int, typer.Option(help="tokens of each line's answer")] = 8,
    streams: Annotated[int, typer.Option(help="interactive clients at a time")] = 2,
    kills: Annotated[int, typer.Option(help="how often the tasks process is killed")] = 0,
    step_tokens: Annotated[int | None, typer.Option(help="the worker's max_num_batched_tokens")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Measure and print."""
    if engine not in ("auto", "sim"):
        raise typer.BadParameter("must be auto or sim", param_hint="--engine")
    kind: Literal["auto", "sim"] = "sim" if engine == "sim" else "auto"
    plan = Plan(kind, 64 if quick else lines, tokens, streams, 8 if quick else 40, kills, step_tokens)
    figures = asyncio.run(measure(plan))
    report(
        "batch_beside", figures, dtype="sim" if engine == "sim" else "float32", json_file=json_file,
        model="SimEngine" if engine == "sim" else MODEL,
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
