"""A job store on a real server, once per installed kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.connect import connect
from shared.jobstore import JobStore
from tests.support.redis_topology import raw_client


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    """A client of an empty Redis, for looking at keys."""
    client = await raw_client(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[JobStore]:
    """A store with the default limits and lifetimes."""
    client = connect(redis_url)
    yield JobStore(client)
    await client.aclose()
