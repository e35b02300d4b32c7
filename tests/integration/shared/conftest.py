"""A job store on a real server, once per installed kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.calls import AsyncClient
from shared.connect import connect
from shared.jobstore import JobStore
from tests.support.chaos.aftermath import everlasting
from tests.support.redis_topology import raw_client


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    """A client of an empty Redis, for looking at keys. In the end every key must expire that is not made to stay."""
    client = await raw_client(redis_url)
    yield client
    found = await everlasting(client)
    await client.aclose()
    assert not found


@pytest.fixture
async def commands(redis_url: str) -> AsyncIterator[AsyncClient]:
    """A client for stores."""
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def store(commands: AsyncClient) -> JobStore:
    """A store with the default limits and lifetimes."""
    return JobStore(commands)
