"""Connections that find their server themselves: the primary that sentinels name, or any node of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import hiredis
import redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.connection import BlockingConnectionPool as AsyncBlockingConnectionPool
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
from redis.connection import BlockingConnectionPool
from redis.sentinel import SentinelConnectionPool

from shared.slot_map import SlotMap


class AsyncSentinelPool(AsyncSentinelConnectionPool, AsyncBlockingConnectionPool):
    """Who finds all connections in use waits, as with one server; the sentinels' own connections end with it."""

    _question: asyncio.Task[Any] | None = None

    async def get_master_address(self) -> Any:
        """The primary's address. A burst of new connections asks the sentinels once."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(super().get_master_address())  # type: ignore[no-untyped-call]
        return await asyncio.shield(self._question)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(super().aclose(), *(sentinel.aclose() for sentinel in self.sentinel_manager.sentinels))


class SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """The same for threads."""

    def close(self) -> None:
        """Close all connections."""
        super().close()
        for sentinel in self.sentinel_manager.sentinels:
            sentinel.close()


@cache
def failing_in_order(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """A kind of connection whose writes fail as a lost connection does, on uvloop too, and that packs commands in C.

    There, a write to a socket that was closed a moment ago raises RuntimeError, which redis-py takes for a bug of its
    caller: it would be raised to the top in place of another try.
    """

    class InOrder(kind):  # type: ignore[valid-type,misc]
        def pack_command(self, *args: Any) -> list[bytes]:
            """A command's bytes, by hiredis: the library's own way takes longer than all else of a call."""
            words = args[0].encode().split() if isinstance(args[0], str) else args[0].split()
            return [hiredis.pack_command((*words, *args[1:]))]

        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            try:
                await super().send_packed_command(command, check_health)
            except RuntimeError as error:
                raise redis.ConnectionError(f"the connection was closed: {error}") from error

    InOrder.__name__ = InOrder.__qualname__ = kind.__name__
    return InOrder


async def set_up(connection: AbstractConnection) -> None:
    """Set up a connection whose reads have no time-out later on.

    Raises:
        redis.TimeoutError: see `_in_time`.
    """
    async with _in_time(connection):
        await connection.on_connect()


@asynccontextmanager
async def _in_time(connection: AbstractConnection) -> AsyncIterator[None]:
    """Give up a server that has taken the connection and says nothing for as long as connecting may take.

    Raises:
        redis.TimeoutError: it does.
    """
    try:
        async with asyncio.timeout(connection.socket_connect_timeout):
            yield
    except TimeoutError:
        raise redis.TimeoutError("the server is silent") from None


class AnyNodeConnection(Connection):
    """A connection to any node of a cluster, in chance order; it remembers what nodes there are for the next time.

    Args:
        slots: with the nodes to begin with.
    """

    def __init__(self, *, slots: SlotMap, **options: Any) -> None:
        self._slots = slots
        super().__init__(redis_connect_func=self._learn, **options)

    async def connect(self) -> None:
        """Connect to the first node that answers.

        Raises:
            redis.ConnectionError: none does; the error is the last one's.
        """
        if self.is_connected:
            return
        error: Exception = redis.ConnectionError("a cluster needs at least one node")
        for host, port in self._slots.candidates():
            self.host, self.port = host, port
            try:
                await super().connect()  # type: ignore[no-untyped-call]
            except (redis.ConnectionError, redis.TimeoutError) as failure:
                error = failure
                self._slots.failed((host, port))
            else:
                return
        raise error

    async def _learn(self, connection: Connection) -> None:
        async with _in_time(self):
            await self.on_connect()
            await self.send_command("CLUSTER", "SLOTS", check_health=False)
            answer = await self.read_response()
        if not self._slots.learn(answer, (self.host, self.port)):
            raise redis.ConnectionError("the node serves no cluster")


class AnyNodeSSLConnection(AnyNodeConnection, SSLConnection):
    """The same over TLS."""
