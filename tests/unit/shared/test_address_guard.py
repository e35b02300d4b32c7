"""Where a client's URL may lead: every way of writing an address that is not public, and names that lie."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from shared import address_guard
from shared.address_guard import AddressGuard, ForbiddenAddressError, UnknownHostError
from shared.errors import InvalidRequestError

PARAM = "callback_url"


class Names:
    """Stands in for DNS: by name the answers, one after the other, the last one for ever."""

    def __init__(self) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        if host not in self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        answers = self.answers[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(None, None, None, "", (address, port)) for address in found]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lambda _, *a, **k: names.getaddrinfo(*a, **k))
    return names


PRIVATE = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::1", "::", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "fe80::1", "fc00::1",
    "fd00:ec2::254", "fec0::1", "ff02::1", "64:ff9b::10.0.0.1", "64:ff9b:1::10.0.0.1", "2002:7f00:1::",
    "2001:0:7f00:1::", "2001:db8::1", "3fff::1", "5f00::1", "100::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
async def test_addresses_that_are_not_public(address: str, names: Names) -> None:
    url = f"https://[{address}]/x" if ":" in address else f"https://{address}/x"
    with pytest.raises(ForbiddenAddressError) as caught:
        AddressGuard().parse(url, PARAM)
    assert caught.value.param == PARAM and address not in caught.value.message
    with pytest.raises(ForbiddenAddressError):
        await AddressGuard().resolve(address, 443)
    names.answers["rebound.test"] = [["8.8.8.8", address]]
    with pytest.raises(ForbiddenAddressError):
        await AddressGuard().resolve("rebound.test", 443)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"])
async def test_public_addresses(address: str) -> None:
    AddressGuard().parse(f"https://[{address}]/" if ":" in address else f"https://{address}/", PARAM)
    [resolved] = await AddressGuard().resolve(address, 443)
    assert socket.getaddrinfo(resolved, 443)


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "127.1", "127.0.1", "127.0.0.1.", "1.2.3.4.5"],
)
def test_addresses_in_other_forms(host: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AddressGuard(http=True).parse(f"https://{host}/", PARAM)
    assert caught.value.param == PARAM


@pytest.mark.parametrize(
    "url",
    [
        "", "x", "//example.com/", "https://", "https:///x", "ftp://example.com/", "file:///etc/passwd", "gopher://e.com",
        "javascript:alert(1)", "data:text/plain,x", "http://example.com/", "HTTP://example.com/", "https://u:p@example.com/",
        "https://u@example.com/", "https://@example.com/", "https://example.com@127.0.0.1/", "https://example.com\\@127.0.0.1/",
        "https://exa mple.com/", "https://example.com/\n", "https://example.com:0/", "https://example.com:65536/",
        "https://example.com:x/", "https://[::1/", "https://[example.com]/", "https://\u2460\u2461\u2466.0.0.1/",
        "https://example.com/" + "x" * 2048, "https://\x00example.com/", " https://example.com/",
    ],
)  # fmt: skip
def test_what_is_no_url_for_a_webhook(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AddressGuard().parse(url, PARAM)
    assert caught.value.param == PARAM and "example" not in caught.value.message.replace("https://example.com/hook", "")


@pytest.mark.parametrize(
    "url",
    ["https://example.com", "https://example.com:8443/a/b?c=d@e", "HTTPS://EXAMPLE.com/", "https://b\u00fccher.de/"],
)
def test_urls_for_webhooks(url: str) -> None:
    assert AddressGuard().parse(url, PARAM).scheme == "https"
    assert AddressGuard(http=True).parse(url.lower().replace("https", "http"), PARAM).scheme == "http"


async def test_at_the_submit_names_are_looked_up(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    names.answers |= {"inside.test": [["10.0.0.1"]], "mixed.test": [["8.8.8.8", "::1"]], "fine.test": [["8.8.8.8"]]}
    for host in ("inside.test", "mixed.test"):
        with pytest.raises(ForbiddenAddressError) as caught:
            await AddressGuard().check(f"https://{host}/", PARAM)
        assert caught.value.param == PARAM
    await AddressGuard().check("https://fine.test/", PARAM)
    await AddressGuard().check("https://not-there-yet.test/", PARAM)

    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(address_guard, "LOOKUP_S", 0.01)
    monkeypatch.setattr(names, "getaddrinfo", never)
    await AddressGuard().check("https://slow.test/", PARAM)


async def test_slow_name_servers_take_few_threads(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_guard, "LOOKUP_S", 0.05)
    asked, answer = 0, asyncio.Event()

    async def slow(*_: Any, **__: Any) -> Any:
        nonlocal asked
        asked += 1
        await answer.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "later")

    monkeypatch.setattr(names, "getaddrinfo", slow)
    guard = AddressGuard()
    for _ in range(2):
        await asyncio.gather(*(guard.check(f"https://n{n}.slow.test/", PARAM) for n in range(20)))
        assert asked == 2, "those that are still being looked up count"
    answer.set()
    await asyncio.sleep(0)
    await guard.check("https://next.slow.test/", PARAM)
    assert asked == 3


async def test_a_name_is_looked_up_for_each_connection(names: Names) -> None:
    names.answers["rebinding.test"] = [["8.8.8.8"], ["127.0.0.1"]]
    guard = AddressGuard()
    assert await guard.resolve("rebinding.test", 443) == ["8.8.8.8"]
    with pytest.raises(ForbiddenAddressError):
        await guard.resolve("rebinding.test", 443)
    with pytest.raises(UnknownHostError):
        await guard.resolve("unknown.test", 443)


async def test_what_is_allowed_besides(names: Names) -> None:
    names.answers |= {host: [["10.1.2.3"]] for host in ("hooks.test", "a.inside.test", "inside.test", "other.test")}
    guard = AddressGuard(["10.2.0.0/16", "::1", "hooks.test", "*.Inside.test."])
    for host, allowed in (
        ("10.2.3.4", True), ("10.1.2.3", False), ("::1", True), ("::ffff:10.2.3.4", True), ("127.0.0.1", False),
        ("hooks.test", True), ("HOOKS.test.", True), ("a.inside.test", True), ("inside.test", False),
        ("other.test", False),
    ):  # fmt: skip
        names.answers.setdefault(host, [["10.1.2.3"]])
        if allowed:
            assert await guard.resolve(host, 443)
        else:
            with pytest.raises(ForbiddenAddressError):
                await guard.resolve(host, 443)


@pytest.mark.parametrize("entry", ["", "10.0.0.1/8", "10.0.0.0/33", "http://x", "a b", "*.", "1.2.3", "u@h", "h:80"])
def test_entries_that_are_none(entry: str) -> None:
    with pytest.raises(ValueError, match="neither a network"):
        AddressGuard([entry])
