"""Noticing that a client has gone, while its request is served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


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

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that may be broken off at any point.

        Raises:
            ClientGoneError: the client went first.
        """
        task = asyncio.create_task(work)

        def break_off() -> None:
            task.cancel()

        self.on_gone(break_off)
        try:
            return await task
        except asyncio.CancelledError:
            if self.gone and task.cancelled():
                raise ClientGoneError from None
            task.cancel()
            raise
        finally:
            if break_off in self._callbacks:
                self._callbacks.remove(break_off)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for callback in self._callbacks:
            callback()
