"""URLs of Redis: one server, a primary behind sentinels, or a cluster.

    redis://[user:password@]host:6379/0             rediss:// for TLS
    unix:///run/redis.sock?db=0
    redis+sentinel://[user:password@]host:26379,host:26379/service/0
    redis+cluster://[user:password@]host:7000,host:7001

The query takes redis-py's options for connections, such as `ssl_ca_certs`, `username` and `password`. Sentinels have
credentials of their own, `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, NoReturn
from urllib.parse import parse_qsl, unquote, urlencode

from shared.errors import InvalidRequestError

Address = tuple[str, int]
Kind = Literal["server", "sentinel", "cluster"]

_URL: Final = re.compile(
    r"(?P<scheme>[a-z][a-z+]*)://(?:(?P<credentials>[^/?#]*)@)?(?P<hosts>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?",
    re.IGNORECASE,
)
_HOST: Final = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<name>[^\[\]:@\s]+))(?::(?P<port>\d{1,5}))?\Z")
_SCHEMES: Final[dict[str, Kind]] = {
    "redis": "server", "rediss": "server", "unix": "server",
    "redis+sentinel": "sentinel", "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster", "rediss+cluster": "cluster",
}  # fmt: skip
_PORTS: Final = {"sentinel": 26379, "cluster": 6379}
#: What `shared.connect` decides alone: payloads are bytes, and time-outs differ between commands and subscriptions.
#: In a URL redis-py would take them as text, and over everything that is set there.
_NOT_IN_URL: Final = frozenset({"decode_responses", "encoding", "encoding_errors", "protocol", "socket_timeout"})
_SENTINEL_OPTIONS: Final = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL taken apart.

    Attributes:
        server: URL in redis-py's form, with credentials, database and options. Where there are several hosts they are
            in `addresses`, and this one has none.
        addresses: of sentinels, or of nodes of the cluster to begin with.
        service: the name under which sentinels watch the primary.
        sentinel: the sentinels' own credentials, `username` and `password` where given.
    """

    kind: Kind
    server: str
    addresses: tuple[Address, ...] = ()
    service: str = ""
    sentinel: tuple[tuple[str, str], ...] = ()


def parse(url: str) -> RedisUrl:
    """Take a URL apart.

    Raises:
        InvalidRequestError: a scheme that is not served, a host, port, service or database that is none, or an option
            that a URL may not set.
    """
    match = _URL.fullmatch(url)
    if match is None:
        _refuse("this is no URL; special characters in user and password are written as %23 and so on")
    kind = _SCHEMES.get(match["scheme"].lower())
    if kind is None:
        _refuse(f"the scheme must be one of {', '.join(_SCHEMES)}")
    options = parse_qsl(match["query"] or "", keep_blank_values=True)
    for name, _ in options:
        if name in _NOT_IN_URL:
            _refuse(f"{name} cannot be set in the URL")
        if name in _SENTINEL_OPTIONS and kind != "sentinel":
            _refuse(f"{name} is for redis+sentinel:// URLs")
    if kind == "server":
        return RedisUrl(kind, url)
    service, database = _path(kind, match["path"], dict(options).get("db"))
    credentials = "" if match["credentials"] is None else f"{match['credentials']}@"
    query = urlencode([(name, value) for name, value in options if name not in _SENTINEL_OPTIONS and name != "db"])
    return RedisUrl(
        kind,
        server=f"{match['scheme'].lower().partition('+')[0]}://{credentials}/{database}?{query}",
        addresses=tuple(_address(host, _PORTS[kind]) for host in match["hosts"].split(",")),
        service=service,
        sentinel=tuple((_SENTINEL_OPTIONS[name], value) for name, value in options if name in _SENTINEL_OPTIONS),
    )


def mask(url: str) -> str:
    """The URL without its passwords, for logs. Never raises."""
    match = _URL.fullmatch(url)
    if match is None or "@" in match["path"]:  # a slash in a password, perhaps
        return "(not a URL of Redis)"
    credentials = match["credentials"]
    if credentials is None:
        user = ""
    else:
        name, colon, _ = credentials.partition(":")
        user = f"{name}:***@" if colon else f"{name}@"
    options = parse_qsl(match["query"] or "", keep_blank_values=True)
    query = urlencode([(name, "***" if "password" in name else value) for name, value in options], safe="*/")
    return f"{match['scheme']}://{user}{match['hosts']}{match['path']}" + (f"?{query}" if query else "")


def _path(kind: Kind, path: str, database: str | None) -> tuple[str, int]:
    """Service and database of a path; the option `db` wins, as in redis-py."""
    parts = [unquote(part) for part in path.strip("/").split("/")] if path.strip("/") else []
    service = ""
    if kind == "sentinel":
        if not parts:
            _refuse("the name of the service is missing, redis+sentinel://host:26379/<service>/<database>")
        service = parts.pop(0)
    if database is not None:
        parts = [database]
    if len(parts) > 1 or (parts and not (parts[0].isascii() and parts[0].isdigit() and len(parts[0]) < 6)):
        _refuse("the path ends with the number of a database")
    number = int(parts[0]) if parts else 0
    if kind == "cluster" and number:
        _refuse("a cluster has database 0 only")
    return service, number


def _address(text: str, default_port: int) -> Address:
    match = _HOST.match(text)
    port = default_port if match is None or match["port"] is None else int(match["port"])
    if match is None or not 0 < port < 65536:
        _refuse("hosts are written host:port,host:port, an IPv6 address as [::1]:port")
    return match["v6"] or unquote(match["name"]), port


def _refuse(why: str) -> NoReturn:
    raise InvalidRequestError(f"redis_url: {why}", param="redis_url")
