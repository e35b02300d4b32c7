"""`/health`, `/ready` and `/metrics` on a small port, from a thread of their own: probes work whatever else is busy."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from shared.metrics import exposition

_log = structlog.stdlib.get_logger("shared.probes")

#: Answers whether it is well, and what to tell.
Probe = Callable[[], tuple[bool, dict[str, Any]]]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news; the base class would print a traceback past the log."""
        gone = isinstance(sys.exception(), ConnectionError | TimeoutError)
        (_log.debug if gone else _log.error)("probe not answered", exc_info=True)


class HealthServer:
    """Serves until closed.

    Args:
        live: for `/health`; not well means that the process should be restarted.
        ready: for `/ready`; not well means that it takes no jobs now.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, *, live: Probe, ready: Probe) -> None:
        probes: dict[str, Probe] = {"/health": live, "/ready": ready}

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            timeout = 10

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    body, media_type = exposition(registry, self.headers.get("Accept"))
                    self._send(200, media_type, body)
                elif path in probes:
                    well, state = probes[path]()
                    self._send(200 if well else 503, "application/json", json.dumps(state).encode())
                else:
                    self._send(404, "application/json", b'{"error": "not found"}')

            def _send(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                _log.debug("probe", line=format % args)

        self._server = _Server((host, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
