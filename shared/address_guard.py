"""Which addresses a URL of a client's may lead to: none that only this side of a firewall can reach.

Names are looked up anew for each connection, every address is looked at, and the connection goes to one of those that
were: a name that changes its mind in between changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shared.errors import InvalidRequestError

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Characters of a URL.
MAX_URL: Final = 2048
#: Seconds that a name may take to be looked up when a job is submitted.
LOOKUP_S: Final = 2.0
#: Names that are looked up at a time when jobs are submitted: a slow name server must not take all threads there are.
_LOOKUPS: Final = 2
#: What IANA has given out to anybody: all else of IPv6 is private, or a way of writing an address of IPv4.
_GLOBAL_V6: Final = ipaddress.IPv6Network("2000::/3")
#: The last 32 bits of these are an address of IPv4, which is what is reached.
_EMBEDDING: Final = tuple(ipaddress.IPv6Network(text) for text in ("::ffff:0:0/96", "64:ff9b::/96"))
_REFUSED: Final[tuple[Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",  # Azure's own services, under an address that counts as public
        "192.0.0.0/24",  # protocols' own; Oracle's metadata
        "192.88.99.0/24",  # relays of 6to4
        "2001::/23",  # Teredo and other protocols' own
        "2001:db8::/32",  # documentation, as 3fff::/20
        "2002::/16",  # 6to4
        "3fff::/20",
    )
)


class ForbiddenAddressError(InvalidRequestError):
    """An address that this server does not send anything to."""

    code = "address_not_allowed"


class UnknownHostError(InvalidRequestError):
    """A name that cannot be looked up, now or at all."""

    code = "host_unknown"


class AddressGuard:
    """Decides what may be reached.

    Args:
        allow: what may be reached besides public addresses: networks (`10.1.0.0/16`), addresses, names of hosts, and
            names with `*.` in front for all beneath them. A name that is allowed may have any address.
        http: whether http is allowed, and not only https.

    Raises:
        ValueError: an entry of `allow` is none of these.
    """

    def __init__(self, allow: Sequence[str] = (), *, http: bool = False) -> None:
        self._networks: list[Network] = []
        self._hosts: set[str] = set()
        self._domains: tuple[str, ...] = ()
        self._http = http
        self._lookups = asyncio.Semaphore(_LOOKUPS)
        for entry in allow:
            self._add(entry.strip())

    def _add(self, entry: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(entry))
        except ValueError:
            name = _plain(entry.removeprefix("*."))
            if not name or any(c in name for c in "/:*@ ") or name.replace(".", "").isdigit():
                raise ValueError(f"{entry!r} is neither a network, as 10.1.0.0/16, nor the name of a host") from None
            if entry.startswith("*."):
                self._domains = (*self._domains, f".{name}")
            else:
                self._hosts.add(name)

    def parse(self, url: str, param: str) -> httpx.URL:
        """A URL that may be asked for, as far as can be told without looking its host up.

        Raises:
            InvalidRequestError: it may not; the message names `param` and holds nothing of the URL.
        """
        import httpx  # settings use this module too, in processes that ask for no URL

        if len(url) > MAX_URL:
            raise InvalidRequestError(f"{param}: at most {MAX_URL} characters are allowed", param=param)
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            raise InvalidRequestError(
                f"{param}: must be a URL, such as https://example.com/hook", param=param
            ) from None
        if parsed.scheme not in ("https", "http") or not parsed.raw_host or any(c.isspace() or c == "\\" for c in url):
            raise InvalidRequestError(f"{param}: must be a URL, such as https://example.com/hook", param=param)
        if parsed.scheme == "http" and not self._http:
            raise InvalidRequestError(f"{param}: must begin with https://", param=param)
        if parsed.userinfo or "@" in url.partition("://")[2].partition("/")[0]:
            raise InvalidRequestError(f"{param}: must not hold a user or a password", param=param)
        if parsed.port is not None and not 1 <= parsed.port <= 65535:
            raise InvalidRequestError(f"{param}: the port must be from 1 to 65535", param=param)
        host = host_of(parsed)
        address = _address(host)
        if address is None and _looks_numeric(host):
            raise ForbiddenAddressError(f"{param}: an address must be written in its usual form", param=param)
        if address is not None and not self.allows(address):
            raise _forbidden(param)
        return parsed

    async def check(self, url: str, param: str) -> None:
        """As `parse`; looks the host up too. A name that cannot be looked up now passes: it may be known by then.

        Raises:
            InvalidRequestError: as `parse`, or an address of the host is not allowed.
        """
        parsed = self.parse(url, param)
        try:
            async with asyncio.timeout(LOOKUP_S):
                await self._lookups.acquire()
                lookup = asyncio.create_task(self.resolve(host_of(parsed), parsed.port or 443), name="lookup")
                lookup.add_done_callback(self._end_lookup)
                await asyncio.shield(lookup)  # the thread that looks it up cannot be told to stop
        except ForbiddenAddressError:
            raise _forbidden(param) from None
        except (UnknownHostError, TimeoutError):
            return

    def _end_lookup(self, lookup: asyncio.Task[list[str]]) -> None:
        self._lookups.release()
        if not lookup.cancelled():
            lookup.exception()  # told to whoever has waited for it

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host in the order in which they are to be tried.

        Raises:
            ForbiddenAddressError: any of them is not allowed.
            UnknownHostError: it has none.
        """
        literal = _address(host)
        if literal is not None:
            found = [literal]
        else:
            found = await _looked_up(host, port)
        if not self._trusts(host) and not all(self.allows(address) for address in found):
            raise ForbiddenAddressError("the host leads to an address that is private, or not allowed here")
        return [str(address) for address in found]

    def allows(self, address: Address) -> bool:
        """Whether an address may be reached."""
        if isinstance(address, ipaddress.IPv6Address):
            for network in _EMBEDDING:
                if address in network:
                    return self.allows(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)) or self._listed(address)
        return self._listed(address) or _is_public(address)

    def _listed(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def _trusts(self, host: str) -> bool:
        name = _plain(host)
        return name in self._hosts or name.endswith(self._domains)


def check_allow(entries: list[str]) -> list[str]:
    """The entries, if `AddressGuard` takes them. Raises ValueError."""
    AddressGuard(entries)
    return entries


def host_of(url: httpx.URL) -> str:
    """The host as it is looked up: in ASCII, without brackets."""
    return url.raw_host.decode("ascii")


def _is_public(address: Address) -> bool:
    if address.is_multicast or any(address in network for network in _REFUSED):
        return False
    return address.is_global and (isinstance(address, ipaddress.IPv4Address) or address in _GLOBAL_V6)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _looks_numeric(host: str) -> bool:
    """Whether the resolver would read it as an address: 2130706433, 0x7f.1, 0177.0.0.1, or 127.1."""
    try:
        socket.inet_aton(host.rstrip("."))
    except OSError:
        return host.rstrip(".").rpartition(".")[2].isdigit()
    return True


async def _looked_up(host: str, port: int) -> list[Address]:
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnknownHostError("the host's name cannot be looked up") from error
    # The scope of a link-local address is left out: none is allowed unless it is listed.
    found = [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    if not found:
        raise UnknownHostError("the host's name has no address")
    return list(dict.fromkeys(found))


def _forbidden(param: str) -> ForbiddenAddressError:
    return ForbiddenAddressError(f"{param}: leads to an address that is private, or not allowed here", param=param)


def _plain(name: str) -> str:
    return name.rstrip(".").lower()
