"""From a URL to a Redis client. Binary clients only: what travels is msgpack, keys are decoded where they are read."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.asyncio.sentinel
import redis.connection
import redis.sentinel
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from shared.calls import AsyncClient, SyncClient
from shared.cluster import Cluster, SyncCluster, node_name
from shared.errors import InvalidRequestError
from shared.pools import (
    AnyNodeConnection,
    AnyNodeSSLConnection,
    AsyncSentinelPool,
    SentinelPool,
    failing_in_order,
    set_up,
)
from shared.redis_url import Address, RedisUrl, parse
from shared.slot_map import SlotMap

#: Seconds until a command without an answer counts as failed; then it is tried again, which every script allows.
SOCKET_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 2.0
#: A connection that was idle for longer is tried with a PING before it is used.
HEALTH_CHECK_S: Final = 15
MAX_CONNECTIONS: Final = 64
RETRIES: Final = 3
#: Seconds to wait for a connection when all are in use. Longer than a command may hold one, all its tries together: a
#: burst waits its turn, and whether Redis is away is found out by those that have a connection.
POOL_TIMEOUT_S: Final = 1.5 * (RETRIES + 1) * SOCKET_TIMEOUT_S

#: Called when a connection stands, to set it up with its `on_connect`, with the name of its node: `host:port` in a
#: cluster, else nothing. What it raises fails the command that the connection was made for.
Connected = Callable[[AbstractConnection, str], Awaitable[None]]
Settings = dict[str, Any]

_Pool = TypeVar("_Pool")


def connect(url: str, *, connected: Connected | None = None, **options: Any) -> AsyncClient:
    """A client for commands: retries with jittered back-off, finite time-outs, a bounded pool that waits its turn.

    In a cluster all of that holds for each node.

    Args:
        url: see `shared.redis_url`.
        options: passed on to redis-py, over the defaults here.

    Raises:
        InvalidRequestError: the URL is not one that is served, or has an option that redis-py does not know.
    """
    target = parse(url)
    settings = _settings(target, redis.asyncio.connection, _async_retry(RETRIES), options)
    if target.kind != "cluster":
        return _async_client(target, _hooked(settings, connected, ""))
    scouts = {**settings, **_once(_async_retry(0))}
    _async_node(scouts, target.addresses[0])  # a wrong option is found out now
    return Cluster(
        SlotMap(target.addresses),
        lambda node: _async_node(_hooked(settings, connected, node_name(node)), node),
        lambda node: _async_node(scouts, node),
    )


def connect_sync(url: str, **options: Any) -> SyncClient:
    """The same for threads. Raises InvalidRequestError as `connect`."""
    target = parse(url)
    settings = _settings(target, redis.connection, _retry(RETRIES), options)
    if target.kind == "cluster":
        scouts = {**settings, **_once(_retry(0))}
        _node(scouts, target.addresses[0])
        return SyncCluster(
            SlotMap(target.addresses), lambda node: _node(settings, node), lambda node: _node(scouts, node)
        )
    if target.kind == "sentinel":
        sentinels = redis.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            target.addresses, sentinel_kwargs=_of_sentinels(target, settings, _retry(0))
        )
        managed = _managed(settings, redis.sentinel)
        pool = _pool(SentinelPool, {**managed, "service_name": target.service, "sentinel_manager": sentinels})
        return redis.Redis.from_pool(pool)
    return redis.Redis.from_pool(_pool(redis.BlockingConnectionPool, settings))


def connect_pubsub(url: str, **options: Any) -> redis.asyncio.Redis:
    """A client for subscriptions. Silence is no error: reads have no time-out, TCP keep-alive finds a dead peer.

    In a cluster it talks to any node, since all of them hear what is published on one; it takes another one when that
    is lost.

    Read with `get_message(timeout=...)` in a loop rather than `listen()`: only then are the health check's PINGs sent.

    Raises:
        InvalidRequestError: as `connect`.
    """
    target = parse(url)
    retry = _async_retry(0 if target.kind == "cluster" else RETRIES)
    settings = _settings(target, redis.asyncio.connection, retry, {"socket_timeout": None, **options})
    if target.kind != "cluster":
        return _async_client(target, {**settings, "redis_connect_func": set_up})
    tls = "connection_class" in settings
    settings["connection_class"] = AnyNodeSSLConnection if tls else AnyNodeConnection
    settings["slots"] = SlotMap(target.addresses)
    return redis.asyncio.Redis.from_pool(_pool(redis.asyncio.BlockingConnectionPool, settings))


def _async_client(target: RedisUrl, settings: Settings) -> redis.asyncio.Redis:
    """The client of one server, or of whichever the sentinels name."""
    if target.kind == "server":
        return redis.asyncio.Redis.from_pool(_pool(redis.asyncio.BlockingConnectionPool, settings))
    sentinels = redis.asyncio.sentinel.Sentinel(  # type: ignore[no-untyped-call]
        target.addresses, sentinel_kwargs=_of_sentinels(target, settings, _async_retry(0))
    )
    managed = _managed(settings, redis.asyncio.sentinel)
    pool = _pool(AsyncSentinelPool, {**managed, "service_name": target.service, "sentinel_manager": sentinels})
    return redis.asyncio.Redis.from_pool(pool)


def _async_node(settings: Settings, node: Address) -> redis.asyncio.Redis:
    host, port = node
    pool = _pool(redis.asyncio.BlockingConnectionPool, {**settings, "host": host, "port": port})
    return redis.asyncio.Redis.from_pool(pool)


def _node(settings: Settings, node: Address) -> redis.Redis:
    host, port = node
    return redis.Redis.from_pool(_pool(redis.BlockingConnectionPool, {**settings, "host": host, "port": port}))


def _pool(kind: Callable[..., _Pool], settings: Settings) -> _Pool:
    """A pool, of which one connection was made (and not opened): only then redis-py looks at the options."""
    try:
        pool: Any = kind(**settings)
        if issubclass(pool.connection_class, AbstractConnection):
            pool.connection_class = failing_in_order(pool.connection_class)
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError, redis.RedisError) as error:
        _, unknown, name = str(error).rpartition("unexpected keyword argument ")
        why = f"{name} is no option of this kind of connection" if unknown else str(error)
        raise InvalidRequestError(f"redis_url: {why}", param="redis_url") from error
    made: _Pool = pool
    return made


def _settings(target: RedisUrl, library: Any, retry: Any, options: Mapping[str, Any]) -> Settings:
    """Options of pool and connections. What the URL says wins, as in redis-py."""
    try:
        from_url: Settings = library.parse_url(target.server)
    except ValueError as error:
        raise InvalidRequestError(f"redis_url: {error}", param="redis_url") from error
    settings: Settings = {
        "decode_responses": False,
        "protocol": 2,
        "retry": retry,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "max_connections": MAX_CONNECTIONS,
        "timeout": POOL_TIMEOUT_S,
    }
    if "path" not in from_url:
        settings |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    return {**settings, **options, **from_url}


def _once(retry: Any) -> Settings:
    """What differs where one question is asked and the next node is at hand."""
    return {"retry": retry, "max_connections": 1, "socket_timeout": CONNECT_TIMEOUT_S}


def _managed(settings: Settings, library: Any) -> Settings:
    """Settings of connections whose address sentinels know."""
    tls = "connection_class" in settings
    kind = library.SentinelManagedSSLConnection if tls else library.SentinelManagedConnection
    return {**settings, "connection_class": kind}


def _of_sentinels(target: RedisUrl, settings: Settings, retry: Any) -> Settings:
    """Settings of the clients of the sentinels themselves: the first that does not answer is left for the next one."""
    shared = {name: value for name, value in settings.items() if name.startswith(("socket_", "ssl_"))}
    tls = {"ssl": True} if "connection_class" in settings else {}
    once = {"retry": retry, "socket_timeout": CONNECT_TIMEOUT_S}
    return {**shared, **tls, "protocol": 2, **once, **dict(target.sentinel)}


def _hooked(settings: Settings, connected: Connected | None, node: str) -> Settings:
    if connected is None:
        return settings

    async def hook(connection: AbstractConnection) -> None:
        await connected(connection, node)

    return {**settings, "redis_connect_func": hook}


def _async_retry(retries: int) -> AsyncRetry:
    return AsyncRetry(ExponentialWithJitterBackoff(base=0.05, cap=0.5) if retries else NoBackoff(), retries)


def _retry(retries: int) -> Retry:
    return Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5) if retries else NoBackoff(), retries)


def _keepalive() -> dict[int, int]:
    """Seconds idle, seconds between probes, probes: a dead peer is found after 30 s. Where the platform has them."""
    names = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    return {getattr(socket, name): value for name, value in names if hasattr(socket, name)}
