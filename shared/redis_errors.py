"""What an error of Redis or of the way to it means to callers."""

from __future__ import annotations

from typing import Final

import redis
import redis.exceptions

from shared.errors import ForeignDataError, ProtocolError, ServiceUnavailableError

#: Everything that talking to Redis may raise.
TROUBLE: Final = (redis.RedisError, OSError)
#: What redis-py says when all connections were in use for too long. It has no class of its own.
_NO_TURN: Final = "No connection available."
#: Errors that pass: Redis is away, loading, full, read-only, failing over, or busy.
_TRANSIENT: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.AskError,  # MOVED too
    OSError,
)
#: The same as the first words of a plain error reply. The last one is of a script whose slot is moved key by key.
_TRANSIENT_CODES: Final = (
    "NOREPLICAS", "MISCONF", "BUSY", "UNKILLABLE", "LOADING", "MASTERDOWN", "READONLY", "OOM",
    "Script attempted to access a non local key",
)  # fmt: skip
#: Seconds after which a client may try again.
RETRY_AFTER_S: Final = 1.0


def unavailable(error: BaseException) -> ServiceUnavailableError | None:
    """What a client is told of an error that passes; None if the error is of another kind."""
    if not isinstance(error, _TRANSIENT) and not str(error).startswith(_TRANSIENT_CODES):
        return None
    if str(error) == _NO_TURN:
        return ServiceUnavailableError("too many commands wait for a connection to Redis", retry_after=RETRY_AFTER_S)
    reason = "is not available"
    if isinstance(error, redis.AuthenticationError):
        reason = "refused the credentials"
    elif isinstance(error, redis.exceptions.MovedError):
        reason = "is a cluster and answers for another node; its URL begins with redis+cluster://"
    return ServiceUnavailableError(f"Redis {reason}: {type(error).__name__}", retry_after=RETRY_AFTER_S)


def foreign(error: BaseException) -> ForeignDataError | None:
    """What a script or command that Redis refuses for its data is to callers; None for any other error."""
    if not isinstance(error, redis.ResponseError) or isinstance(error, redis.exceptions.NoPermissionError):
        return None
    if str(error).startswith("RW") or unavailable(error) is not None:
        return None
    return ForeignDataError(f"Redis refused a command: {error}")


def typed(error: Exception) -> Exception:
    """The error as callers see it; one that nobody foresaw stays as it is."""
    seen: Exception | None
    if str(error).startswith("RW"):
        seen = ProtocolError(f"a script refused its arguments: {error}")
    else:
        seen = unavailable(error) or foreign(error)
    if seen is None:
        return error
    seen.__cause__ = error
    return seen
