"""A gateway on a real port in this process, and a worker played by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from gateway.app import create_app
from gateway.main import BoundedHttp
from gateway.services import Services
from shared.connect import connect
from shared.jobs import Ending, Lease, Publication, Publish, PullBudget, PulledJob
from shared.jobstore import JobStore
from shared.protocol import (
    Card,
    ChoiceFrame,
    ChoiceResult,
    ErrorInfo,
    Frame,
    JobStatus,
    Result,
    Timings,
    Usage,
    WorkerInfo,
    encode,
)
from shared.settings import GatewaySettings
from tests.support.at_rest import assert_at_rest
from tests.unit.gateway import support

BUDGET = PullBudget(
    sequences=dict.fromkeys(("high", "normal", "batch"), 64),
    tokens=dict.fromkeys(("high", "normal", "batch"), 1_000_000),
    max_job_tokens=1_000_000,
)


@dataclass
class Running:
    """A job in the hands of the test."""

    worker: Worker
    job: PulledJob
    seq: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.job.envelope.id

    def frame(self, kind: str, choices: Sequence[ChoiceFrame] = (), **more: Any) -> bytes:
        """The next frame, encoded; what it adds to the job is remembered for the result."""
        self.seq += 1
        for choice in choices:
            self.tokens.setdefault(choice.index, []).extend(choice.ids)
            self.texts[choice.index] = self.texts.get(choice.index, "") + choice.text
            if choice.finish is not None:
                self.finishes[choice.index] = choice.finish
        return encode(
            Frame(v=1, seq=self.seq, epoch=self.job.epoch, kind=kind, choices=list(choices), **more)  # type: ignore[arg-type]
        )

    async def publish(self, frames: list[bytes], ending: Ending | None = None) -> Publication:
        """Send frames that `frame` made."""
        item = Publish(self.id, self.worker.owner, self.job.epoch, self.seq - len(frames) + 1, frames, ending)
        return (await self.worker.store.publish([item]))[0]

    async def say(self, text: str, *, index: int = 0, ids: list[int] | None = None, **more: Any) -> Publication:
        """One token with this text."""
        offset = len(self.tokens.get(index, []))
        ids = [7] if ids is None else ids
        return await self.publish(
            [self.frame("tokens", [ChoiceFrame(index=index, offset=offset, ids=ids, text=text, **more)])]
        )

    async def start(self) -> None:
        """The first frame of a job."""
        await self.publish([self.frame("started")])

    async def finish(
        self,
        finish: str | None = "stop",
        *,
        status: JobStatus = "completed",
        error: ErrorInfo | None = None,
        **more: Any,
    ) -> Publication:
        """The last frame: closes every choice that is open, unless `finish` is None."""
        n = self.job.envelope.sampling.n
        choices = [
            ChoiceFrame(index=i, offset=len(self.tokens.get(i, [])), finish=finish, **more)  # type: ignore[arg-type]
            for i in range(n)
            if finish is not None and i not in self.finishes
        ]
        usage = Usage(
            prompt_tokens=len(self.job.envelope.prompt_token_ids),
            completion_tokens=sum(map(len, self.tokens.values())),
            cached_tokens=1,
        )
        timings = Timings(queue_ms=1.5, first_token_ms=2.0, run_ms=3.0, blocks=4)
        kind = "done" if error is None else "error"
        frame = self.frame(kind, choices, status=status, usage=usage, timings=timings, error=error)
        result = Result(
            id=self.id,
            status=status,
            choices=[
                ChoiceResult(
                    index=i,
                    text=self.texts.get(i, ""),
                    token_ids=self.tokens.get(i, []),
                    finish_reason=self.finishes.get(i),
                )
                for i in range(n)
            ],
            usage=usage,
            timings=timings,
            error=error,
        )
        return await self.publish([frame], Ending(status, encode(result)))

    async def answer(self, *texts: str, finish: str = "stop") -> None:
        """A whole answer, one frame per text."""
        await self.start()
        for text in texts:
            await self.say(text)
        await self.finish(finish)


class Worker:
    """Pulls and publishes as a worker does."""

    def __init__(self, store: JobStore, owner: str = "w1") -> None:
        self.store, self.owner = store, owner
        self._taken: list[Running] = []

    async def join(self, *, kv_tokens: int = 2048) -> None:
        """Enter the registry."""
        await self.store.heartbeat(support.MODEL, WorkerInfo(owner=self.owner, kv_tokens=kv_tokens), 15_000)

    async def pull(self, lanes: int = 1) -> Running:
        """Wait for one job and take it."""
        async with asyncio.timeout(20):
            while not self._taken:
                for lane in range(lanes):
                    pulled = await self.store.pull(support.MODEL, lane, self.owner, BUDGET, Lease())
                    self._taken += [Running(self, job) for job in pulled.jobs]
                if not self._taken:
                    await asyncio.sleep(0.005)
        return self._taken.pop(0)

    async def queued(self, lanes: int = 1) -> int:
        """Jobs that wait."""
        return (await self.store.pool_load(support.MODEL, lanes)).queued_jobs


@dataclass
class Gateway:
    """A gateway under test."""

    url: str
    http: httpx.AsyncClient
    services: Services
    worker: Worker
    redis_url: str

    @property
    def store(self) -> JobStore:
        return self.worker.store

    async def until(self, job_id: str, *statuses: str) -> str:
        """Wait until a job is in one of these states."""
        async with asyncio.timeout(20):
            while True:
                status, _ = await self.store.status(job_id)
                if status in statuses:
                    return status
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serve(
    redis_url: str, *, card: Any = None, bundle: Any = None, clean: bool = True, **settings: Any
) -> AsyncIterator[Gateway]:
    """A gateway over an empty Redis with one pool; `card` False for none. With `clean` it must leave nothing behind."""
    lanes = card.lanes if isinstance(card, Card) else 1
    client = connect(redis_url)
    store = JobStore(client)
    if card is not False:
        await store.put_card(card or support.card(), bundle or support.bundle())
    async with running(redis_url, **settings) as (url, services), httpx.AsyncClient(base_url=url, timeout=30) as http:
        yield Gateway(url, http, services, Worker(store), redis_url)
    await client.aclose()
    if clean:
        await assert_at_rest(redis_url, support.MODEL, lanes)


@asynccontextmanager
async def running(redis_url: str, **settings: Any) -> AsyncIterator[tuple[str, Services]]:
    """The application on uvicorn, on a free port."""
    app = create_app(GatewaySettings(redis_url=redis_url, **settings))
    config = uvicorn.Config(
        app, port=0, http=BoundedHttp, loop="none", lifespan="on", log_config=None, access_log=False,
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", app.state.services
    finally:
        server.should_exit = True
        await task


def chat(content: str = "hello", **more: Any) -> dict[str, Any]:
    """A body of a chat request."""
    return {"model": support.MODEL, "messages": [{"role": "user", "content": content}], **more}


def completion(prompt: Any = "hello", **more: Any) -> dict[str, Any]:
    """A body of a completion request."""
    return {"model": support.MODEL, "prompt": prompt, **more}


@dataclass
class Event:
    """One server-sent event."""

    data: Any
    id: int | None = None


async def events(response: httpx.Response) -> AsyncIterator[Event]:
    """Events of a stream; `[DONE]` comes as text."""
    number: int | None = None
    async for line in response.aiter_lines():
        if line.startswith("id:"):
            number = int(line[3:])
        elif line.startswith("data:"):
            text = line[5:].strip()
            yield Event(text if text == "[DONE]" else json.loads(text), number)
            number = None
