"""Noticing that a client has gone, while its request is served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from shared.errors import PayloadTooLargeError


class ClientGoneError(Exception):
    """The client went away; nobody is left to answer."""


class Disconnect:
    """Watches one connection, from when the body has been read. Use as an async context manager."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    async def __aenter__(self) -> Disconnect:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back when the client goes, at once if it has gone."""
        if self.gone:
            callback()
        else:
            self._callbacks.append(callback)

    async def _watch(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except PayloadTooLargeError:
            pass  # it sends a body where none is read, and more than is taken: nobody to wait for
        self.gone = True
        for callback in self._callbacks:
            callback()
