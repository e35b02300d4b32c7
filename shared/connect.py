"""From a URL to a Redis client. Binary clients only: what travels is msgpack, keys are decoded where they are read."""

from __future__ import annotations

import socket
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from shared.errors import ForeignDataError, InvalidRequestError, ServiceUnavailableError

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
#: What redis-py says when that is over. It has no class of its own.
_NO_TURN: Final = "No connection available."

#: What this module decides alone: payloads are bytes, and time-outs differ between commands and subscriptions. In a URL
#: redis-py would take them as text, and over everything that is set here.
_NOT_IN_URL: Final = frozenset({"decode_responses", "encoding", "encoding_errors", "protocol", "socket_timeout"})

#: Errors that pass: Redis is away, loading, full, read-only, failing over, or busy.
_TRANSIENT: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    OSError,
)
#: The same as the first word of a plain error reply.
_TRANSIENT_CODES: Final = ("NOREPLICAS", "MISCONF", "BUSY", "UNKILLABLE", "LOADING", "MASTERDOWN", "READONLY", "OOM")
#: Refusals that have to do with rights or with a cluster, not with data.
_OF_OTHERS: Final = (redis.exceptions.NoPermissionError, redis.exceptions.AskError)
#: Seconds after which a client may try again.
RETRY_AFTER_S: Final = 1.0


def connect(url: str, **options: Any) -> redis.asyncio.Redis:
    """A client for commands: retries with jittered back-off, finite time-outs, a bounded pool that waits its turn.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        options: passed on to redis-py, over the defaults here.

    Raises:
        InvalidRequestError: a scheme that is not served, or an option that a URL may not set.
    """
    retry = AsyncRetry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), RETRIES)
    settings = {"timeout": POOL_TIMEOUT_S, "retry": retry, **_settings(url), **options}
    return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool.from_url(url, **settings))


def connect_sync(url: str, **options: Any) -> redis.Redis:
    """The same for threads. Raises InvalidRequestError as `connect`."""
    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), RETRIES)
    settings = {"timeout": POOL_TIMEOUT_S, "retry": retry, **_settings(url), **options}
    return redis.Redis.from_pool(redis.BlockingConnectionPool.from_url(url, **settings))


def connect_pubsub(url: str, **options: Any) -> redis.asyncio.Redis:
    """A client for subscriptions. Silence is no error: reads have no time-out, TCP keep-alive finds a dead peer.

    Read with `get_message(timeout=...)` in a loop rather than `listen()`: only then are the health check's PINGs sent.

    Raises:
        InvalidRequestError: a scheme that is not served, or an option that a URL may not set.
    """
    return connect(url, **{"socket_timeout": None, **options})


def mask(url: str) -> str:
    """The URL without its password, for logs."""
    parts = urlsplit(url)
    netloc = parts.netloc
    if "@" in netloc:
        credentials, _, host = netloc.rpartition("@")
        user, colon, _ = credentials.partition(":")
        netloc = f"{user}:***@{host}" if colon else f"{user}@{host}"
    query = urlencode([(k, "***" if k == "password" else v) for k, v in parse_qsl(parts.query)], safe="*/")
    return f"{parts.scheme}://{netloc}{parts.path}" + (f"?{query}" if query else "")


def unavailable(error: BaseException) -> ServiceUnavailableError | None:
    """What a client is told of an error that passes; None if the error is of another kind."""
    if not isinstance(error, _TRANSIENT) and not str(error).startswith(_TRANSIENT_CODES):
        return None
    if str(error) == _NO_TURN:
        return ServiceUnavailableError("too many commands wait for a connection to Redis", retry_after=RETRY_AFTER_S)
    reason = "refused the credentials" if isinstance(error, redis.AuthenticationError) else "is not available"
    return ServiceUnavailableError(f"Redis {reason}: {type(error).__name__}", retry_after=RETRY_AFTER_S)


def foreign(error: BaseException) -> ForeignDataError | None:
    """What a script or command that Redis refuses for its data is to callers; None for any other error."""
    if not isinstance(error, redis.ResponseError) or isinstance(error, _OF_OTHERS):
        return None
    if str(error).startswith("RW") or unavailable(error) is not None:
        return None
    return ForeignDataError(f"Redis refused a command: {error}")


def _settings(url: str) -> dict[str, Any]:
    scheme = urlsplit(url).scheme
    if scheme.startswith(("redis+", "rediss+")):
        raise InvalidRequestError(f"redis_url: {scheme}:// is not served yet", param="redis_url")
    if scheme not in ("redis", "rediss", "unix"):
        raise InvalidRequestError("redis_url: the scheme must be redis://, rediss:// or unix://", param="redis_url")
    for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name in _NOT_IN_URL:
            raise InvalidRequestError(f"redis_url: {name} cannot be set in the URL", param="redis_url")
    settings: dict[str, Any] = {
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "max_connections": MAX_CONNECTIONS,
    }
    if scheme != "unix":
        settings |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    return settings


def _keepalive() -> dict[int, int]:
    """Seconds idle, seconds between probes, probes: a dead peer is found after 30 s. Where the platform has them."""
    names = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    return {getattr(socket, name): value for name, value in names if hasattr(socket, name)}
