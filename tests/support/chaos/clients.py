"""Clients of the gateways: they lose connections, come back, and write down all that they are given."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from ropeway.client import APIError, AsyncClient
from tests.support.chaos.plan import Order
from tests.support.chaos.witness import (
    Arrival,
    Delta,
    Reading,
    Witness,
    choices_of,
    deltas_of_chunk,
    deltas_of_event,
)

#: Statuses that ask to come again.
_AGAIN = frozenset({429, 503})
#: Seconds without a byte after which a connection counts as lost; the gateways send a comment sooner.
READ_S = 10.0
_ENDS = frozenset({"done", "error"})


class LostError(Exception):
    """The client gives up: what it was promised did not come."""


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. `id` only where the event itself has one."""

    data: str
    id: int | None


async def events_of(response: httpx.Response) -> AsyncIterator[Event]:
    """Events of a response in order. Strict: anything but ids, data and comments is an error."""
    pending = b""
    async for chunk in response.aiter_raw():
        *blocks, pending = (pending + chunk).split(b"\n\n")
        for block in blocks:
            number, data = None, None
            for line in block.decode().split("\n"):
                name, _, value = line.partition(": ")
                if name == "id":
                    number = int(value)
                elif name == "data":
                    data = value
                elif not line.startswith(":"):
                    raise LostError(f"no line of a stream: {line[:40]!r}")
            if data is not None:
                yield Event(data, number)


class ChaosClient:
    """Serves orders against any of the gateways.

    Args:
        urls: of the gateways.
        http: carries the requests.
        patience_s: longest time without anything new until it gives up.
    """

    def __init__(self, urls: Sequence[str], http: httpx.AsyncClient, patience_s: float) -> None:
        self._urls, self._http, self._patience_s = urls, http, patience_s

    async def serve(self, order: Order) -> Witness:
        """From the request to the end of the answer; never raises for what the other side does."""
        return await _Visit(order, self._urls, self._http, self._patience_s).run()


class _Visit:
    """One order."""

    def __init__(self, order: Order, urls: Sequence[str], http: httpx.AsyncClient, patience_s: float) -> None:
        self._order, self._urls, self._http, self._patience_s = order, urls, http, patience_s
        self._rng = random.Random(order.draw)
        self._breaks = list(order.breaks)
        self._events = 0
        self._limit = asyncio.timeout(patience_s)
        self.witness = Witness(order)

    async def run(self) -> Witness:
        ways = {
            "stream": self._stream,
            "whole": self._whole,
            "follow": self._follow,
            "library": self._library,
            "fetch": self._fetch,
        }
        try:
            async with self._limit:
                await ways[self._order.way]()
        except TimeoutError:
            self.witness.failure = f"nothing new for {self._patience_s:g} s"
        except (LostError, APIError) as error:
            self.witness.failure = f"{type(error).__name__}: {error}"
        return self.witness

    # The ways

    async def _stream(self) -> None:
        """Chunks of an OpenAI stream; what is missing after a loss comes from the job's events, or from a repeat."""
        witness, order = self.witness, self._order
        while True:
            reading = Reading()
            try:
                if await self._chunks(reading):
                    return
            except httpx.TransportError:
                self._lost()
            if reading.closed:
                return
            if witness.job_id is None or (order.key is not None and order.comes_back):
                await self._pause()
                continue
            await self._read_events(reading)
            return

    async def _whole(self) -> None:
        """One answer; asked for again, under its key, until it comes."""
        while self.witness.answer is None:
            try:
                response = await self._post(self._order.path, self._order.body, key=self._order.key)
            except httpx.TransportError:
                self._lost()
                await self._pause()
                continue
            if response is not None:
                self._accepted(response)
                self.witness.answer = choices_of(response.json())

    async def _follow(self) -> None:
        await self._submit()
        readings = [self._read_events(self._new_reading()) for _ in range(self._order.readers)]
        await asyncio.gather(*readings)

    async def _fetch(self) -> None:
        await self._submit()
        while self.witness.status is None:
            body = await self._call("GET", f"/v1/jobs/{self.witness.job_id}?wait=2")
            if body["status"] not in ("queued", "running"):
                self._result(body)

    async def _library(self) -> None:
        """As `follow`, with the project's own client, at one gateway."""
        await self._submit()
        job_id, reading = str(self.witness.job_id), self._new_reading()
        async with AsyncClient(self._url(), timeout=READ_S) as client:
            async for event in client.events(job_id, patience_s=self._patience_s):
                self._arrived(reading, Arrival(time.monotonic(), event.seq, deltas_of_event(event.data)))
                reading.status = event.data.get("status")
        self._result(await self._call("GET", f"/v1/jobs/{job_id}"))

    # Their parts

    async def _chunks(self, reading: Reading) -> bool:
        """One connection's chunks; True if they went on to the end."""
        order, pending = self._order, list[Delta]()
        async with self._open("POST", order.path, json=order.body, key=order.key) as response:
            if not await self._welcome(response):
                return False
            self._accepted(response)
            self.witness.readings.append(reading)
            async for event in events_of(response):
                if event.data == "[DONE]":
                    reading.status = self.witness.status = "ended"
                    return True
                data = json.loads(event.data)
                if "error" in data:
                    raise LostError(f"an error in the stream: {data['error']['code']}")
                pending += (delta for delta in deltas_of_chunk(data) if _says_something(delta))
                if event.id is None:
                    continue
                # A frame is whole with its number; what came of one that is not is told again.
                self._arrived(reading, Arrival(time.monotonic(), event.id, tuple(pending), chunks=True))
                pending = []
                if await self._goes(reading):
                    return False
        self._lost()
        return False

    async def _submit(self) -> None:
        while self.witness.job_id is None:
            try:
                response = await self._post(self._order.path, self._order.body, key=self._order.key)
            except httpx.TransportError:
                self._lost()
                await self._pause()
                continue
            if response is not None:
                self._accepted(response)

    async def _read_events(self, reading: Reading) -> None:
        """The job's events behind what was read, over as many connections as it takes."""
        path = f"/v1/jobs/{self.witness.job_id}/events"
        while reading.status is None and not reading.closed:
            headers = {"last-event-id": str(reading.seq)} if reading.seq else {}
            try:
                async with self._open("GET", path, headers=headers) as response:
                    if await self._welcome(response):
                        await self._take_events(reading, response)
            except httpx.TransportError:
                self._lost()
            if reading.status is None and not reading.closed:
                await self._pause()

    async def _take_events(self, reading: Reading, response: httpx.Response) -> None:
        async with aclosing(events_of(response)) as events:
            async for event in events:
                data = json.loads(event.data)
                if "seq" not in data:
                    self.witness.refusals += 1  # about this connection only
                    return
                if data["seq"] != event.id:
                    raise LostError(f"event {event.id} says that it is {data['seq']}")
                self._arrived(reading, Arrival(time.monotonic(), data["seq"], deltas_of_event(data)))
                if data["kind"] in _ENDS:
                    reading.status = self.witness.status = data["status"]
                    return
                if await self._goes(reading):
                    return
        self._lost()

    async def _goes(self, reading: Reading) -> bool:
        """What the client does of its own will behind an event; True if it drops the connection."""
        self._events += 1
        if self._events == self._order.cancel_at:
            await self._call("POST", f"/v1/jobs/{self.witness.job_id}/cancel")
        if self._events == self._order.leaves_at:
            reading.closed = True
            return True
        if self._breaks and self._events >= self._breaks[0]:
            self._breaks.pop(0)
            self.witness.drops += 1
            return True
        return False

    def _result(self, body: dict[str, Any]) -> None:
        self.witness.status = body["status"]
        if body["result"] is not None:
            self.witness.answer = choices_of(body["result"])

    def _new_reading(self) -> Reading:
        self.witness.readings.append(Reading())
        return self.witness.readings[-1]

    def _arrived(self, reading: Reading, arrival: Arrival) -> None:
        reading.arrivals.append(arrival)
        self._news()

    def _news(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + self._patience_s)

    def _accepted(self, response: httpx.Response) -> None:
        """The answer names the job: from here on it may not be lost, and must stay this one."""
        job_id = response.headers["x-ropeway-job-id"]
        if self._order.key is not None and self.witness.job_id not in (None, job_id):
            raise LostError(f"the key stands for two jobs, {self.witness.job_id} and {job_id}")
        self.witness.job_id = job_id
        self._news()

    # HTTP

    async def _call(self, method: str, path: str) -> dict[str, Any]:
        """The body of an answer that comes sooner or later."""
        while True:
            try:
                response = await self._http.request(method, self._url() + path)
                if await self._welcome(response):
                    body: dict[str, Any] = response.json()
                    return body
            except httpx.TransportError:
                self._lost()
            await self._pause()

    async def _post(self, path: str, body: dict[str, Any], *, key: str | None) -> httpx.Response | None:
        """One try; None where the gateway asks to come again."""
        headers = {} if key is None else {"idempotency-key": key}
        response = await self._http.post(self._url() + path, json=body, headers=headers)
        if await self._welcome(response):
            return response
        await self._pause()
        return None

    def _open(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        headers: dict[str, str] | None = None,
        key: str | None = None,
    ) -> Any:
        headers = dict(headers or {}) | ({} if key is None else {"idempotency-key": key})
        return self._http.stream(method, self._url() + path, json=json, headers=headers)

    async def _welcome(self, response: httpx.Response) -> bool:
        """Whether the answer is one; False if the client is to come again.

        Raises:
            LostError: it was refused for good.
        """
        if response.is_success:
            return True
        await response.aread()
        self.witness.refusals += 1
        if response.status_code not in _AGAIN and not self._is_unloaded(response):
            raise LostError(f"{response.request.method} {response.request.url.path}: {response.status_code} "
                            f"{response.text[:200]}")  # fmt: skip
        return False

    def _is_unloaded(self, response: httpx.Response) -> bool:
        """Whether the answer says that the order's adapter is not there: it will be again."""
        unknown = response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
        return unknown and self._order.adapter is not None

    def _url(self) -> str:
        return self._rng.choice(self._urls)

    def _lost(self) -> None:
        self.witness.losses += 1

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.02, 0.3))


def _says_something(delta: Delta) -> bool:
    """The chunk of a role says nothing."""
    return bool(delta.text or delta.logprobs) or delta.finish is not None
