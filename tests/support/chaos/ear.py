"""Listens to the channels of all jobs: who published what, in which order."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType

import msgspec
import redis.asyncio

from shared.connect import connect_pubsub
from shared.keys import JobId


class _Head(msgspec.Struct):
    """What is read of a frame."""

    seq: int
    epoch: int
    kind: str


_decoder = msgspec.msgpack.Decoder(_Head)


@dataclass(slots=True)
class Heard:
    """One job's frames as they were on its channel. `times` are monotonic seconds."""

    epochs: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Ear:
    """Hears every frame, but for those that are published while its own connection is cut or Redis is away."""

    def __init__(self, url: str) -> None:
        self._client = connect_pubsub(url)
        self.jobs: dict[str, Heard] = {}
        self.listens = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ear:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._client.aclose()

    @property
    def live(self) -> list[str]:
        """Jobs that have begun and not ended."""
        return [job_id for job_id, heard in self.jobs.items() if not heard.ended]

    async def until_taken_up(self, job_id: str, epoch: int) -> None:
        """Until a frame of a later epoch, or the last one, was heard."""
        heard = self.jobs[job_id]
        while not heard.ended and heard.epochs[-1] <= epoch:
            heard.news.clear()
            await heard.news.wait()

    async def _run(self) -> None:
        while True:
            try:
                async with self._client.pubsub() as pubsub:
                    await pubsub.psubscribe("rw:{*}:ev:*")
                    async for message in pubsub.listen():
                        self.listens.set()
                        if message["type"] == "pmessage":
                            self._hear(message["channel"].decode(), message["data"])
            except (redis.RedisError, OSError):
                await asyncio.sleep(0.05)

    def _hear(self, channel: str, data: bytes) -> None:
        job_id = channel.partition(":ev:")[2]
        if JobId.match(job_id) is None or not data:  # a large frame is in the log alone
            return
        head = _decoder.decode(data)
        heard = self.jobs.setdefault(job_id, Heard())
        heard.epochs.append(head.epoch)
        heard.times.append(time.monotonic())
        heard.ended = heard.ended or head.kind in ("done", "error")
        heard.news.set()
