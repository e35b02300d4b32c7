"""The gateway as a process: `python -m gateway`, or `run` from the command line's code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.app import create_app
from shared import logs
from shared.errors import InvalidRequestError
from shared.settings import GatewaySettings

log = structlog.get_logger(__name__)

#: Exit code for settings that cannot be served.
EXIT_SETTINGS = 2
#: Bytes of a request's line and headers.
MAX_HEAD_BYTES = 64 * 1024
#: Connections that wait to be accepted.
BACKLOG = 2048
#: Seconds that an idle connection is kept: longer than clients (httpx: 5) and load balancers (60, as a rule) keep
#: theirs. They are to let go first: a connection closed here with a request on its way to it fails that request.
KEEP_ALIVE_S = 75


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's own, with a bound on a request's head: the parser has none, and slows down with each byte of a line."""

    _head: int | None = 0  # bytes received of the head; None behind it

    def data_received(self, data: bytes) -> None:
        """Feed the parser, as long as the head is not too large."""
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def on_headers_complete(self) -> None:
        """The body follows, which the application bounds."""
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request's head follows."""
        self._head = 0
        super().on_message_complete()


class GracefulServer(uvicorn.Server):
    """uvicorn's own, but a process that ends as it was told to ends with exit code 0.

    uvicorn raises the signal once more behind the shutdown, so that the code is 143: a failure to supervisors.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT shut down in order; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def server(settings: GatewaySettings) -> uvicorn.Server:
    """The server, not yet running; `serve` and `run` are uvicorn's."""
    # A thread of ours tokenizes one prompt; threads of the library's own would only contend.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return GracefulServer(
        uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http=BoundedHttp,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=settings.shutdown_grace_s,
        )
    )


def run(settings: GatewaySettings | None = None) -> None:
    """Serve until a signal comes."""
    settings = settings or GatewaySettings()
    logs.configure(settings.log_level, settings.log_json)
    try:
        made = server(settings)
    except InvalidRequestError as error:
        log.error("gateway.refused", reason=error.message)
        sys.exit(EXIT_SETTINGS)
    made.run()
