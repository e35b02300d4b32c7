"""A TCP proxy in front of a Redis server that loses or holds back what passes, and a server with one answer to all."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from urllib.parse import urlsplit

import hiredis


class RedisProxy:
    """Forwards bytes. Answers to script calls can be lost after the server has run them; anything can be held back.

    Attributes:
        lose: how many more answers to EVALSHA are lost, each with its connection.
        lost: how many were.
        refuse: new connections are closed at once.
        requested: set when a request has passed; to be cleared by the test.
    """

    def __init__(self, url: str) -> None:
        self._port = urlsplit(url).port
        self._answers, self._requests = asyncio.Event(), asyncio.Event()
        self.go_on()
        self._serving: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.lose = 0
        self.lost = 0
        self.refuse = False
        self.requested = asyncio.Event()

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold(self, *, requests: bool = False) -> None:
        """Keep answers back, with `requests` those too: a network on which nothing arrives."""
        self._answers.clear()
        if requests:
            self._requests.clear()

    def go_on(self) -> None:
        """Deliver what was kept back, and what comes."""
        self._answers.set()
        self._requests.set()

    def cut(self) -> None:
        """Close all connections; what is on its way is lost."""
        for pump in list(self._pumps):
            pump.cancel()

    async def __aenter__(self) -> RedisProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            if self.refuse:
                raise ConnectionRefusedError
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        script_called = asyncio.Event()

        async def requests() -> None:
            while data := await reader.read(65536):
                if b"EVALSHA" in data:
                    script_called.set()
                await self._requests.wait()
                up_writer.write(data)
                await up_writer.drain()
                self.requested.set()

        async def answers() -> None:
            while data := await up_reader.read(65536):
                if self.lose and script_called.is_set():
                    self.lose -= 1
                    self.lost += 1
                    return
                script_called.clear()
                await self._answers.wait()
                writer.write(data)
                await writer.drain()

        pumps = {asyncio.create_task(requests()), asyncio.create_task(answers())}
        self._pumps |= pumps
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._pumps -= pumps
        for side in (writer, up_writer):
            side.close()
            with contextlib.suppress(ConnectionError):
                await side.wait_closed()


class OneAnswerServer:
    """Answers every command with the same line, but CLIENT with OK: as a Redis that is loading does."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.connections = 0
        self.commands = 0
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aenter__(self) -> OneAnswerServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    async def stop(self) -> None:
        """Close all connections and the port, for a real server to take its place."""
        self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self.connections += 1
        parser = hiredis.Reader()
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    self.commands += 1
                    writer.write(b"+OK\r\n" if command[0] == b"CLIENT" else self.answer + b"\r\n")
                await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
