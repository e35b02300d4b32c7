"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer, binary
from tests.support.redis_topology import ClusterServers, SentinelServers

# Triton reads it when it is imported, which any test module may bring about: the kernels' tests need its interpreter.
# Not where there is a GPU, for which other tests' engines want it to compile: there, those of the kernels run alone.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

Servers = RedisServer | SentinelServers | ClusterServers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--redis-topology",
        choices=["single", "sentinel", "cluster"],
        help="run every test that needs a Redis on this; else on single servers, those marked `topologies` on all",
    )
    parser.addoption("--kernels", action="store_true", help="run also the tests that only `make kernels` runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--kernels"):
        for item in items:
            if item.get_closest_marker("kernels") is not None:
                item.add_marker(pytest.mark.skip(reason="only with --kernels: see `make kernels`"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "redis_server" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--redis-topology")
    kinds = ["valkey", "redis"]
    if chosen in ("sentinel", "cluster"):
        kinds = [chosen]
    elif chosen is None and metafunc.definition.get_closest_marker("topologies") is not None:
        kinds += ["sentinel", "cluster"]
    metafunc.parametrize("redis_server", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Real servers; tests that use them run once per kind that is installed, and per topology where they are marked."""
    yield from _serve(request.param)


@pytest.fixture(scope="session")
def valkey_server(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """The embedded server only: for tests where the kind of server does not matter."""
    chosen = request.config.getoption("--redis-topology")
    yield from _serve(chosen if chosen in ("sentinel", "cluster") else "valkey")


@pytest.fixture
def redis_url(redis_server: Servers) -> str:
    """URL of an empty Redis."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def valkey_url(valkey_server: Servers) -> str:
    """URL of an empty embedded server."""
    valkey_server.flush()
    return valkey_server.url


def _serve(kind: str) -> Iterator[Servers]:
    if kind == "sentinel":
        with SentinelServers() as sentinels:
            yield sentinels
    elif kind == "cluster":
        with ClusterServers() as cluster:
            yield cluster
    elif binary(kind) is None:
        pytest.skip(f"no {kind} server installed")
    else:
        server = RedisServer(kind)
        server.start()
        yield server
        server.close()
