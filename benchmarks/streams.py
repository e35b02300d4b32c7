"""A load generator for SSE streams that costs little: one protocol per connection, bytes counted rather than parsed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence

import msgspec

from shared.connect import connect_pubsub

#: One of so many streams has its delivery lag measured.
_SAMPLED = 25
#: Connections that are opened per second.
_RAMP_PER_S = 250
_ID = re.compile(rb"id: (\d+)\n")
_JOB = re.compile(rb"x-ropeway-job-id: (\S+)", re.IGNORECASE)


class _Seq(msgspec.Struct):
    seq: int


_decoder = msgspec.msgpack.Decoder(_Seq)


class _Stream(asyncio.Protocol):
    """One request and its stream."""

    def __init__(self, request: bytes, sampled: bool) -> None:
        self._request, self.sampled = request, sampled
        self.job_id: str | None = None
        self.events = self.tokens = 0
        self.ended = False
        self.arrivals: dict[int, float] = {}
        self.first_at = 0.0
        self.last_at = 0.0
        self._rest = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.last_at = time.monotonic()
        lines, _, self._rest = (self._rest + data).rpartition(b"\n")
        if self.job_id is None:
            self.first_at = self.last_at
            head, _, lines = lines.partition(b"\r\n\r\n")
            found = _JOB.search(head)
            self.job_id = found[1].decode() if found is not None else ""
        ids, events = lines.count(b"id: "), lines.count(b"data: ")
        self.events += ids
        # An answer of the simulated engine is made of words with a space in front, a token each; its JSON has no other.
        self.tokens += lines.count(b" ") - ids - events
        if self.sampled:
            for match in _ID.finditer(lines):
                self.arrivals[int(match[1])] = self.last_at
        if b"data: [DONE]" in lines:
            self.ended = True
            self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish()

    def finish(self) -> None:
        """Nothing more comes."""
        if not self.done.done():
            self.done.set_result(None)


class StreamLoad:
    """Opens streams, holds all of them at once, and counts.

    Attributes:
        complete: streams that had all their tokens and their end.
        events, tokens: of all streams; `seconds` from the first to the last of them.
        lags: seconds from a frame's publication to its arrival, of the sampled streams.
    """

    def __init__(self, port: int, redis_url: str, model: str, tokens: int) -> None:
        self._port, self._redis_url, self._model, self._wanted = port, redis_url, model, tokens
        self.complete = self.events = self.tokens = 0
        self.seconds = 0.0
        self.lags: list[float] = []

    async def run(self, streams: int) -> None:
        """Hold so many streams to their ends."""
        subscriber = connect_pubsub(self._redis_url)
        heard: dict[tuple[str, int], float] = {}
        loop = asyncio.get_running_loop()
        opened: list[_Stream] = []
        async with subscriber.pubsub() as pubsub:
            await pubsub.subscribe("none")  # it cannot be listened to before
            listening = asyncio.create_task(_listen(pubsub, heard))
            for number in range(streams):
                stream = _Stream(self._request(number), sampled=number % _SAMPLED == 0)
                await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", self._port)  # type: ignore[misc]
                opened.append(stream)
                await asyncio.sleep(1 / _RAMP_PER_S)
            followed: set[str] = set()
            waiting = {stream.done for stream in opened}
            while waiting:
                new = [s.job_id for s in opened if s.sampled and s.job_id and s.job_id not in followed]
                if new:
                    await pubsub.subscribe(*(_channel(job_id) for job_id in new))
                    followed.update(new)
                _, waiting = await asyncio.wait(waiting, timeout=0.2)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        await subscriber.aclose()
        self._count(opened, heard)

    def _count(self, opened: Sequence[_Stream], heard: dict[tuple[str, int], float]) -> None:
        self.events = sum(stream.events for stream in opened)
        self.tokens = sum(stream.tokens for stream in opened)
        self.complete = sum(stream.ended and stream.tokens == self._wanted for stream in opened)
        self.seconds = max(s.last_at for s in opened) - min(s.first_at for s in opened)
        for stream in opened:
            for seq, at in stream.arrivals.items():
                published = heard.get((stream.job_id or "", seq))
                if published is not None:
                    self.lags.append(at - published)

    def _request(self, number: int) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": f"Stream {number}",
                "max_tokens": self._wanted,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _listen(pubsub: object, heard: dict[tuple[str, int], float]) -> None:
    """When the sampled frames were published."""
    while True:
        message = await pubsub.get_message(timeout=1.0)  # type: ignore[attr-defined]
        if message is not None and message["type"] == "message" and message["data"]:
            job_id = message["channel"].decode().partition(":ev:")[2]
            heard[job_id, _decoder.decode(message["data"]).seq] = time.monotonic()


def _channel(job_id: str) -> str:
    pool_lane = job_id.rpartition(".")[0]
    return f"rw:{{{pool_lane}}}:ev:{job_id}"


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
