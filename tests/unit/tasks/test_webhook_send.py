"""One try of a webhook against receivers that do what they should not."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any

import pytest
import trustme

from shared.address_guard import AddressGuard
from tasks.webhook_send import Sender, Sent
from tests.support.ports import free_port
from tests.support.receiver import Answer, Receiver, receiver

HEADERS = [(b"webhook-id", b"msg_1"), (b"content-type", b"application/json")]
LOCAL = AddressGuard(["127.0.0.0/8"], http=True)


async def sent(url: str, *, guard: AddressGuard = LOCAL, timeout_s: float = 20.0, trust: Any = None) -> Sent:
    return await Sender(guard, timeout_s, trust).send(url, HEADERS, b'{"a":1}')


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """By name the addresses that are answered, one after the other, the last one for ever."""
    answers: dict[str, list[str]] = {}

    async def getaddrinfo(_: Any, host: str, port: int, **more: Any) -> list[Any]:
        if host not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        found = answers[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found.pop(0) if len(found) > 1 else found[0], port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return answers


async def test_it_is_a_post_with_its_body(lookups: dict[str, list[str]]) -> None:
    lookups["hooks.test"] = ["127.0.0.1"]
    with receiver() as server:
        answer = await sent(f"http://hooks.test:{server.port}/a/b?c=d#e")
        [request] = server.received
    assert answer == Sent("delivered", 204)
    assert (request.path, request.body) == ("/a/b?c=d", b'{"a":1}')
    assert request.headers["host"] == f"hooks.test:{server.port}" and request.headers["webhook-id"] == "msg_1"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(200), "delivered"),
        (Answer(299), "delivered"),
        (Answer(410), "gone"),
        (Answer(400), "answered"),
        (Answer(404), "answered"),
        (Answer(500), "answered"),
        (Answer(304), "answered"),
    ],
    ids=lambda value: value.status if isinstance(value, Answer) else "",
)
async def test_what_is_a_success(answer: Answer, outcome: str) -> None:
    with receiver(answer) as server:
        found = await sent(server.url)
    assert (found.outcome, found.status) == (outcome, answer.status)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(status: int) -> None:
    with receiver() as inside, receiver(Answer(status, {"location": inside.url})) as server:
        found = await sent(server.url)
        assert (found.outcome, found.status) == ("answered", status) and "redirect" in found.error
        assert inside.received == []


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("120", 120, 120),
        ("+300", 200, 301),
        ("-300", 0, 0),
        ("5.5", 0, 0),
        ("soon", 0, 0),
        ("9" * 400, 0, 1e9),
        ("", 0, 0),
    ],
)
async def test_retry_after(value: str, least: float, most: float) -> None:
    """A value with a sign is so many seconds from now, as a date."""
    if value[:1] in ("+", "-"):
        value = formatdate(time.time() + int(value), usegmt=True)
    with receiver(Answer(503, {"retry-after": value})) as server:
        assert least <= (await sent(server.url)).retry_after_s <= most


async def test_of_a_giant_answer_little_is_read() -> None:
    giant = Answer(200, body=b"x" * 65536, pieces=4096)
    with receiver(giant) as server:
        assert (await sent(server.url)).outcome == "delivered"
        server.until(lambda: server.sent > 0)
    assert server.sent < 64 * 65536  # of 268 MB what fits into buffers on the way


async def test_an_answer_that_never_ends_is_an_answer() -> None:
    with receiver(Answer(200, body=b"x", pieces=10**6, pause_s=0.05)) as server:
        began = time.monotonic()
        assert (await sent(server.url, timeout_s=60)).outcome == "delivered"
        assert time.monotonic() - began < 50


async def test_an_answer_that_never_begins() -> None:
    with receiver(Answer(delay_s=60)) as server:
        found = await sent(server.url, timeout_s=0.3)
    assert found == Sent("timeout", error="no answer within 0.3 s")


@contextmanager
def speaking(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that speaks in its own way; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            try:
                connection, _ = listening.accept()
                with connection:
                    speak(connection)
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    thread.join(20)


async def test_a_head_that_comes_byte_by_byte() -> None:
    def speak(connection: socket.socket) -> None:
        for _ in range(200):
            connection.sendall(b"H")
            time.sleep(0.05)

    with speaking(speak) as url:
        assert (await sent(url, timeout_s=0.5)).outcome in ("timeout", "connection")


async def test_interim_answers_without_end() -> None:
    def speak(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
            time.sleep(0.01)

    with speaking(speak) as url:
        assert (await sent(url, timeout_s=0.5)).outcome == "timeout"


@pytest.mark.parametrize(
    "said", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000, b"\x16\x03\x01"], ids=len
)
async def test_what_is_no_answer(said: bytes) -> None:
    def speak(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(said)

    with speaking(speak) as url:
        assert (await sent(url)).outcome == "connection"


async def test_nobody_listens(lookups: dict[str, list[str]]) -> None:
    assert await sent(f"http://127.0.0.1:{free_port()}/") == Sent("connection", error="it cannot be reached")
    found = await sent("http://unknown.test/")
    assert found.outcome == "connection" and "looked up" in found.error


async def test_addresses_that_are_not_allowed(lookups: dict[str, list[str]]) -> None:
    lookups |= {"inside.test": ["127.0.0.1"], "metadata.test": ["169.254.169.254"]}
    guard = AddressGuard(http=True)
    with receiver() as server:
        for host in (
            "127.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "2130706433",
            "0x7f.1",
            "inside.test",
            "metadata.test",
        ):
            found = await sent(f"http://{host}:{server.port}/", guard=guard)
            assert found.outcome == "address" and found.status is None, host
        found = await sent(f"http://user@127.0.0.1:{server.port}/")
        assert found.outcome == "address"
        assert server.received == []


async def test_the_address_that_was_looked_at_is_the_one_that_is_dialled(
    lookups: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is public when it is looked at, and private a moment later."""
    dialled: list[str] = []

    async def connect(remote_host: str, **_: Any) -> Any:
        dialled.append(remote_host)
        raise OSError("not here")

    lookups["rebinding.test"] = ["8.8.8.8", "127.0.0.1"]
    monkeypatch.setattr("anyio.connect_tcp", connect)
    with receiver() as server:
        url, guard = f"http://rebinding.test:{server.port}/", AddressGuard(http=True)
        assert (await sent(url, guard=guard)).outcome == "connection"
        assert dialled == ["8.8.8.8"]
        assert (await sent(url, guard=guard)).outcome == "address"
        assert dialled == ["8.8.8.8"] and server.received == []


class Authority:
    """Certificates of a test's own."""

    def __init__(self) -> None:
        self.ca = trustme.CA()
        self.client = ssl.create_default_context()
        self.ca.configure_trust(self.client)

    def server(self, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(name).configure_cert(context)
        return context


async def test_certificates_are_checked_against_the_host(lookups: dict[str, list[str]]) -> None:
    lookups |= {"hooks.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}
    guard, authority = AddressGuard(["hooks.test", "other.test"]), Authority()

    def url(server: Receiver, host: str = "hooks.test") -> str:
        return f"https://{host}:{server.port}/"

    with receiver(trust=authority.server("hooks.test")) as server:
        assert (await sent(url(server), guard=guard, trust=authority.client)).outcome == "delivered"
        found = await sent(url(server, "other.test"), guard=guard, trust=authority.client)
        assert found.outcome == "tls" and "certificate" in found.error
        assert (await sent(url(server), guard=guard, trust=None)).outcome == "tls", "nobody knows who signed it"
        assert len(server.received) == 1
    with receiver(trust=Authority().server("hooks.test")) as server:
        assert (await sent(url(server), guard=guard, trust=authority.client)).outcome == "tls"
    with receiver() as server:
        assert (await sent(url(server), guard=guard, trust=authority.client)).outcome == "tls", "it speaks no TLS"
