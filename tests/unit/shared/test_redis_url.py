"""URLs: which are served, what is in them, and what a log may show of them."""

from __future__ import annotations

import pytest

from shared.errors import InvalidRequestError
from shared.redis_url import RedisUrl, mask, parse


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@host:1/2", "redis://:***@host:1/2"),
        ("rediss://user:secret@host/0", "rediss://user:***@host/0"),
        ("redis://user:se%40cr:et@host", "redis://user:***@host"),
        ("redis://user:secret@secret@host", "redis://user:***@host"),
        ("redis://user@host", "redis://user@host"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=***"),
        ("unix://:secret@/run/redis.sock", "unix://:***@/run/redis.sock"),
        ("redis+sentinel://u:secret@a:1,[::1]:2/main/0", "redis+sentinel://u:***@a:1,[::1]:2/main/0"),
        ("redis+sentinel://a/m?sentinel_password=secret&db=1", "redis+sentinel://a/m?sentinel_password=***&db=1"),
        ("rediss+cluster://:secret@a,b?ssl_password=secret", "rediss+cluster://:***@a,b?ssl_password=***"),
        ("redis://user:se/cret@host", "(not a URL of Redis)"),
        ("redis://user:#secret@host", "(not a URL of Redis)"),
        ("secret", "(not a URL of Redis)"),
        ("", "(not a URL of Redis)"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert mask(url) == shown and "secret" not in mask(url)


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://u:p@h?ssl_ca_certs=x", "unix:///run/s?db=2"])
def test_one_server_is_left_to_redis_py(url: str) -> None:
    assert parse(url) == RedisUrl("server", url)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        (
            "redis+sentinel://u:p%2F@one:1,[2001:db8::1]:2,three/main/4",
            RedisUrl(
                "sentinel",
                "redis://u:p%2F@/4?",
                (("one", 1), ("2001:db8::1", 2), ("three", 26379)),
                "main",
            ),
        ),
        (
            "rediss+sentinel://s/my%20main?sentinel_username=su&sentinel_password=s%26p&db=3&ssl_ca_certs=/ca.pem",
            RedisUrl(
                "sentinel",
                "rediss:///3?ssl_ca_certs=%2Fca.pem",
                (("s", 26379),),
                "my main",
                (("username", "su"), ("password", "s&p")),
            ),
        ),
        ("redis+cluster://a:7000,b", RedisUrl("cluster", "redis:///0?", (("a", 7000), ("b", 6379)))),
        ("REDISS+CLUSTER://:p@a/0", RedisUrl("cluster", "rediss://:p@/0?", (("a", 6379),))),
    ],
)
def test_several_hosts_are_taken_apart(url: str, parsed: RedisUrl) -> None:
    assert parse(url) == parsed


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h", "scheme"),
        ("unix+sentinel:///run/s/main", "scheme"),
        ("host:6379", "no URL"),
        ("", "no URL"),
        ("redis://u:p#x@h", "%23"),
        ("redis+sentinel://h", "service"),
        ("redis+sentinel://h/", "service"),
        ("redis+sentinel://h/main/zero", "database"),
        ("redis+sentinel://h/main/0/0", "database"),
        ("redis+sentinel://h/main/-1", "database"),
        ("redis+sentinel://h/main?db=x", "database"),
        ("redis+sentinel:///main", "host"),
        ("redis+sentinel://a,/main", "host"),
        ("redis+sentinel://a:0/main", "host"),
        ("redis+sentinel://a:65536/main", "host"),
        ("redis+sentinel://::1/main", "host"),
        ("redis+cluster://h/1", "database 0"),
        ("redis+cluster://h?db=1", "database 0"),
        ("redis+cluster://a:b", "host"),
        ("redis+cluster://h?sentinel_password=x", "sentinel_password"),
        ("redis://h?sentinel_username=x", "sentinel_username"),
    ],
)
def test_other_urls_are_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^redis_url: ") as caught:
        parse(url)
    assert caught.value.param == "redis_url" and why in caught.value.message


@pytest.mark.parametrize(
    "option", ["decode_responses=True", "decode_responses=", "encoding=latin-1", "protocol=3", "socket_timeout=1"]
)
@pytest.mark.parametrize(
    "url", ["redis://h/0?", "rediss://h?", "unix:///tmp/none.sock?db=2&", "redis+sentinel://h/s?", "redis+cluster://h?"]
)
def test_a_url_cannot_change_what_replies_are(url: str, option: str) -> None:
    with pytest.raises(InvalidRequestError, match=option.partition("=")[0]) as caught:
        parse(url + option)
    assert caught.value.param == "redis_url"
