"""One prompt through the whole system: HTTP, Redis, a worker, and back as a stream; then what it took."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from typing import Any

import httpx
from rich.markup import escape
from rich.table import Table

from ropeway.client import APIError, AsyncClient, Job
from ropeway.console import err, fail, out
from ropeway.options import Given
from ropeway.serve import Layout, redis_for
from ropeway.supervise import ChildEndedError, InterruptedBySignalError

DEFAULT_PROMPT = "In two sentences: what is a ropeway, and why does its cable never stop?"
_LOG_LINES = 20


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked, and how much may be answered."""

    prompt: str
    max_tokens: int


def demo(given: Given, redis_url: str | None, question: Question) -> None:
    """Start everything, ask, print answer and figures, end everything."""
    # Ports are free ones, so that a demo runs beside whatever is there; the children write into a log. Of keys it has
    # those that are set, and asks for no others.
    given = {"log_level": "warning", **given, "port": 0, "health_port": 0, "require_keys": False}
    with redis_for(redis_url, None) as (url, embedded), tempfile.TemporaryFile() as log:
        layout = Layout.of(given, url)
        supervisor = layout.supervisor(embedded, log)
        try:
            asyncio.run(supervisor.run(_ask(layout, question)))
        except InterruptedBySignalError as error:
            fail(f"ended by {error}", 128 + error.number)
        except (ChildEndedError, APIError, httpx.TransportError) as error:
            log.seek(0)
            for line in log.read().decode("utf-8", errors="replace").splitlines()[-_LOG_LINES:]:
                err.print(line, markup=False)
            fail(str(error), getattr(error, "exit_code", 1))


async def _ask(layout: Layout, question: Question) -> None:
    started = time.monotonic()
    with err.status(f"starting Redis, a gateway and a worker with {layout.worker.model} ..."):
        await layout.ready()
    ready_s = time.monotonic() - started
    async with layout.client() as client:
        model = (await client.models())[0]
        out.print(f"[bold]{escape(model)}[/], ready after {ready_s:.1f} s\n")
        out.print(f"[bold cyan]Prompt[/]  {escape(question.prompt)}", soft_wrap=True)
        out.print("[bold cyan]Answer[/]  ", end="")
        job = await _stream(client, model, question)
    out.print(_table(job))
    err.print("Next: `ropeway serve` (or `make serve`), then `ropeway submit` in another terminal", markup=False)


async def _stream(client: AsyncClient, model: str, question: Question) -> Job:
    """Print the answer as it comes; answers the ended job."""
    job = await client.submit(question.prompt, model=model, max_tokens=question.max_tokens, temperature=0.0)
    async for event in client.events(job.id):
        out.out(event.text(), end="", highlight=False)
        out.file.flush()
    out.print("\n")
    job = await client.wait(job.id, timeout=10.0)
    if job.error is not None:
        raise job.error
    return job


def _table(job: Job) -> Table:
    """What the job took: on its worker's clock, so without the way through HTTP."""
    timings: dict[str, Any] = job.data.get("timings") or {}
    usage: dict[str, Any] = job.data.get("usage") or {}
    first_ms, run_ms = float(timings.get("first_token_ms", 0.0)), float(timings.get("run_ms", 0.0))
    tokens = int(usage.get("completion_tokens", 0))
    # The first token ends the prefill; speed is that of the tokens after it.
    decode_s = (run_ms - first_ms) / 1000
    speed = f"{(tokens - 1) / decode_s:.1f}" if tokens > 1 and decode_s > 0 else "-"
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("status", job.status)
    table.add_row("queue time", f"{float(timings.get('queue_ms', 0.0)):.1f} ms")
    table.add_row("time to first token", f"{first_ms:.1f} ms")
    table.add_row("tokens per second", speed)
    table.add_row("prompt tokens", str(usage.get("prompt_tokens", 0)))
    table.add_row("completion tokens", str(tokens))
    table.add_row("KV blocks used", str(timings.get("blocks", 0)))
    return table
