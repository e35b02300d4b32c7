"""Clients: binary, finite, checked, and their options."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from shared.cluster import Cluster, SyncCluster
from shared.connect import connect, connect_pubsub, connect_sync
from shared.errors import InvalidRequestError
from shared.redis_errors import unavailable

SERVERS = ["redis://u:p@h:1/2", "rediss://u:p@h:1/2", "unix:///tmp/none.sock?db=2&username=u&password=p"]
SENTINELS = ["redis+sentinel://u:p@a,b/main/2", "rediss+sentinel://u:p@a,b/main/2"]
CLUSTERS = ["redis+cluster://u:p@a,b", "rediss+cluster://u:p@a,b"]


def pools(url: str) -> list[Any]:
    """The pools of the clients for commands; of a cluster, those of one node."""
    clients: list[Any] = [connect(url), connect_sync(url)]
    return [
        (client.at(("h", 1)) if isinstance(client, Cluster | SyncCluster) else client).connection_pool
        for client in clients
    ]


@pytest.mark.parametrize("url", SERVERS + SENTINELS + CLUSTERS)
def test_clients_are_binary_finite_and_checked(url: str) -> None:
    for pool in pools(url):
        settings = pool.connection_kwargs
        assert settings["decode_responses"] is False and settings["db"] == (0 if url in CLUSTERS else 2)
        assert (settings["username"], settings["password"]) == ("u", "p")
        assert 0 < settings["socket_timeout"] < 60 and 0 < settings["socket_connect_timeout"] < 60
        assert settings["health_check_interval"] > 0
        assert settings["retry"].get_retries() > 0
        assert settings.get("socket_keepalive", False) is not url.startswith("unix")
        connection = pool.connection_class(**settings)
        assert connection.socket_timeout == settings["socket_timeout"]
        assert ("SSL" in pool.connection_class.__name__) is url.startswith("rediss")
        held = (settings["retry"].get_retries() + 1) * settings["socket_timeout"]
        assert pool.timeout > held, "who waits gives up before those who hold a connection"


@pytest.mark.parametrize("url", [SERVERS[0], SENTINELS[0], CLUSTERS[0], CLUSTERS[1]])
def test_a_subscription_has_no_read_time_out(url: str) -> None:
    settings = connect_pubsub(url).connection_pool.connection_kwargs
    assert settings["socket_timeout"] is None and settings["socket_keepalive"] and settings["health_check_interval"]


@pytest.mark.parametrize("url", [SERVERS[0], SENTINELS[0], CLUSTERS[0]])
def test_options_win(url: str) -> None:
    client = connect(url, max_connections=3)
    node = client.at(("h", 1)) if isinstance(client, Cluster) else client
    assert node.connection_pool.max_connections == 3


def test_sentinels_have_credentials_and_tls_of_their_own() -> None:
    url = "rediss+sentinel://u:p@a:1,b/main?ssl_ca_certs=/ca&sentinel_username=su&sentinel_password=sp"
    for pool in pools(url):
        for sentinel, host in zip(pool.sentinel_manager.sentinels, ("a", "b"), strict=True):
            kwargs = sentinel.connection_pool.connection_kwargs
            assert (kwargs["host"], kwargs["username"], kwargs["password"]) == (host, "su", "sp")
            assert kwargs["ssl_ca_certs"] == "/ca" and "SSL" in sentinel.connection_pool.connection_class.__name__
            assert kwargs["retry"].get_retries() == 0, "the next one is at hand"
            assert 0 < kwargs["socket_timeout"] <= 5
        assert pool.connection_kwargs["ssl_ca_certs"] == "/ca"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://h?no_such=1", "no_such"),
        ("redis+sentinel://h/main?no_such=1", "no_such"),
        ("redis+cluster://h?no_such=1", "no_such"),
        ("redis+cluster://h?ssl_ca_certs=/ca", "ssl_ca_certs"),
        ("rediss://h?ssl_cert_reqs=maybe", "maybe"),
        ("redis://h?max_connections=many", "max_connections"),
        ("redis://h:99999", "[Pp]ort"),
        ("http://h", "scheme"),
    ],
)
def test_a_wrong_url_is_an_error_at_once_and_names_itself(url: str, why: str) -> None:
    for call in (connect, connect_sync, connect_pubsub):
        with pytest.raises(InvalidRequestError, match=f"^redis_url: .*{why}") as caught:
            call(url)
        assert caught.value.param == "redis_url"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (redis.ConnectionError("x"), True),
        (redis.TimeoutError("x"), True),
        (redis.exceptions.BusyLoadingError("x"), True),
        (redis.ReadOnlyError("x"), True),
        (redis.OutOfMemoryError("x"), True),
        (redis.exceptions.MasterDownError("x"), True),
        (redis.exceptions.MaxConnectionsError("x"), True),
        (redis.exceptions.ClusterDownError("x"), True),
        (redis.exceptions.TryAgainError("x"), True),
        (redis.exceptions.MovedError("1 h:1"), True),
        (redis.exceptions.AskError("1 h:1"), True),
        (redis.ResponseError("NOREPLICAS Not enough good replicas"), True),
        (redis.ResponseError("MISCONF cannot persist"), True),
        (redis.ResponseError("Script attempted to access a non local key in a cluster node"), True),
        (OSError("no route"), True),
        (redis.ResponseError("ERR wrong number of arguments"), False),
        (redis.ResponseError("WRONGTYPE Operation against a key"), False),
    ],
)
def test_errors_that_pass_can_be_tried_again(error: Exception, passes: bool) -> None:
    typed = unavailable(error)
    assert (typed is not None) is passes
    if typed is not None:
        assert typed.status == 503 and typed.retry_after and type(error).__name__ in typed.message


def test_a_cluster_behind_the_url_of_one_server_is_named() -> None:
    typed = unavailable(redis.exceptions.MovedError("1 h:1"))
    assert typed is not None and "redis+cluster://" in typed.message
