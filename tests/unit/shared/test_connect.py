"""URLs: which are served, with what settings, and what a log may show of them."""

from __future__ import annotations

import pytest
import redis

from shared.connect import connect, connect_pubsub, connect_sync, mask, unavailable
from shared.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@host:1/2", "redis://:***@host:1/2"),
        ("rediss://user:secret@host/0", "rediss://user:***@host/0"),
        ("redis://user:se%40cr:et@host", "redis://user:***@host"),
        ("redis://user@host", "redis://user@host"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=***"),
        ("unix://:secret@/run/redis.sock", "unix://:***@/run/redis.sock"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert mask(url) == shown


@pytest.mark.parametrize(
    "url", ["redis+sentinel://h/1", "redis+cluster://h", "http://h", "host:6379", "", "rediss+sentinel://x"]
)
def test_other_schemes_are_refused(url: str) -> None:
    for call in (connect, connect_sync, connect_pubsub):
        with pytest.raises(InvalidRequestError) as caught:
            call(url)
        assert caught.value.param == "redis_url"


@pytest.mark.parametrize(
    "option", ["decode_responses=True", "decode_responses=", "encoding=latin-1", "protocol=3", "socket_timeout=1"]
)
@pytest.mark.parametrize("url", ["redis://h/0?", "rediss://h?", "unix:///tmp/none.sock?db=2&"])
def test_a_url_cannot_change_what_replies_are(url: str, option: str) -> None:
    for call in (connect, connect_sync, connect_pubsub):
        with pytest.raises(InvalidRequestError, match=option.partition("=")[0]) as caught:
            call(url + option)
        assert caught.value.param == "redis_url"


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://h:1/2", "unix:///tmp/none.sock?db=2"])
def test_clients_are_binary_finite_and_checked(url: str) -> None:
    for client in (connect(url), connect_sync(url)):
        settings = client.connection_pool.connection_kwargs
        assert settings["decode_responses"] is False and settings["db"] == 2
        assert 0 < settings["socket_timeout"] < 60 and 0 < settings["socket_connect_timeout"] < 60
        assert settings["health_check_interval"] > 0
        assert settings["retry"].get_retries() > 0
        assert settings.get("socket_keepalive", False) is not url.startswith("unix")
        connection = client.connection_pool.connection_class(**settings)
        assert connection.socket_timeout == settings["socket_timeout"]
        held = (settings["retry"].get_retries() + 1) * settings["socket_timeout"]
        assert client.connection_pool.timeout > held, "who waits gives up before those who hold a connection"


def test_a_subscription_has_no_read_time_out() -> None:
    settings = connect_pubsub("redis://h").connection_pool.connection_kwargs
    assert settings["socket_timeout"] is None and settings["socket_keepalive"] and settings["health_check_interval"]


def test_options_win() -> None:
    assert connect("redis://h", max_connections=3).connection_pool.max_connections == 3


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
        (redis.ResponseError("NOREPLICAS Not enough good replicas"), True),
        (redis.ResponseError("MISCONF cannot persist"), True),
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
