"""A receiver of webhooks on a port of its own, whose answers a test decides."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.body)
        return event

    def verified(self, secret: str) -> dict[str, Any]:
        """The event, if its signature is right."""
        event: dict[str, Any] = Webhook(secret).verify(self.body, dict(self.headers))
        return event


@dataclass
class Answer:
    """What is answered: after `delay_s` the status, then `body` as often as there are `pieces`, with pauses."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay_s: float = 0.0
    pieces: int = 1
    pause_s: float = 0.0


class Receiver:
    """The server. `answer` is asked for each request; `sent` is how many bytes of answers went out."""

    def __init__(self, answer: Callable[[Received], Answer], trust: ssl.SSLContext | None) -> None:
        self.answer, self.received, self.sent = answer, list[Received](), 0
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        if trust is not None:
            self._server.socket = trust.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def ids(self) -> list[str]:
        """Ids of webhooks as they came."""
        return [one.id for one in self.received]

    def until(self, reached: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something."""
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"not in time; received {[one.headers for one in self.received]}"
            time.sleep(0.02)

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                body = self.rfile.read(size)
                if len(body) < size:  # whoever sent it has died
                    return
                names = {name.lower(): value for name, value in self.headers.items()}
                received = Received(self.path, names, body)
                receiver.received.append(received)
                receiver._send(self, receiver.answer(received))

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        self._ended.wait(answer.delay_s)
        try:
            handler.send_response(answer.status)
            for name, value in {"content-length": str(len(answer.body) * answer.pieces), **answer.headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            for _ in range(answer.pieces if answer.body else 0):
                handler.wfile.write(answer.body)
                self.sent += len(answer.body)
                if self._ended.wait(answer.pause_s):
                    return
        except OSError:  # whoever asked has gone
            pass


@contextmanager
def receiver(
    answer: Callable[[Received], Answer] | Answer | None = None, *, trust: ssl.SSLContext | None = None
) -> Iterator[Receiver]:
    """A receiver that answers 204, or what is said; over TLS with `trust`."""
    fixed = answer if isinstance(answer, Answer) else Answer()
    server = Receiver(answer if callable(answer) else lambda _: fixed, trust)
    try:
        yield server
    finally:
        server.close()
