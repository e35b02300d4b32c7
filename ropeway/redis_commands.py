"""What commands that speak with Redis, and not with a gateway, have in common."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

from ropeway.console import EXIT_USAGE, err, fail
from ropeway.embedded import EmbeddedRedisError, default_data_dir, serving_url
from ropeway.options import Given, build
from shared.connect import connect
from shared.errors import InvalidRequestError, RopewayError, ServiceUnavailableError
from shared.jobstore import JobStore
from shared.redis_url import mask
from shared.settings import CommonSettings

S = TypeVar("S", bound=JobStore)
T = TypeVar("T")


def run(given: Given, store: type[S], call: Callable[[S], Awaitable[T]]) -> T:
    """What a call of a store answers; our errors end the command in one line."""
    redis_url = _redis_url(build(CommonSettings, given))

    async def main() -> T:
        client = connect(redis_url)
        try:
            return await call(store(client))
        finally:
            await client.aclose()

    try:
        return asyncio.run(main())
    except ServiceUnavailableError as error:
        other = (
            "--redis or ROPEWAY_REDIS_URL names another one, of `ropeway serve --data-dir DIR` unix://DIR/redis.sock"
        )
        fail(f"{error.message} ({mask(redis_url)}; {other})")
    except RopewayError as error:
        fail(error.message, EXIT_USAGE if isinstance(error, InvalidRequestError) and error.param else 1)


def _redis_url(settings: CommonSettings) -> str:
    """The Redis that is named; where none is, that of a `ropeway serve` on this machine, if one is there."""
    named = "redis_url" in settings.model_fields_set
    return settings.redis_url if named else redis_of_serve() or settings.redis_url


def redis_of_serve() -> str | None:
    """The Redis of a `ropeway serve` that runs on this machine on the default folder; it is said that it is meant."""
    with contextlib.suppress(EmbeddedRedisError):  # no home folder: nothing can be there
        if url := serving_url(default_data_dir()):
            err.print(f"ropeway: in the Redis of `ropeway serve`, {url}", markup=False, soft_wrap=True)
            return url
    return None


def time_text(unix_ms: int) -> str:
    """A moment as people and programs read it."""
    return datetime.fromtimestamp(unix_ms / 1e3, UTC).isoformat(timespec="seconds")
