"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support.redis_server import RedisServer, binary


@pytest.fixture(scope="session", params=["valkey", "redis"])
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A real server; tests that use it run once per kind that is installed."""
    if binary(request.param) is None:
        pytest.skip(f"no {request.param} server installed")
    server = RedisServer(request.param)
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[RedisServer]:
    """The embedded server only: for tests where the kind of server does not matter."""
    server = RedisServer("valkey")
    server.start()
    yield server
    server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty real server, once per installed kind."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        client.script_flush()
    return redis_server.url


@pytest.fixture
def valkey_url(valkey_server: RedisServer) -> str:
    """URL of an empty embedded server."""
    with redis.Redis(port=valkey_server.port) as client:
        client.flushall()
    return valkey_server.url
