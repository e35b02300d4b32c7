"""A job store on a real server, once per installed kind."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from shared.connect import connect
from shared.jobstore import JobStore


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of an empty server."""
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def store(client: redis.asyncio.Redis) -> JobStore:
    """A store with the default limits and lifetimes."""
    return JobStore(client)
