"""The gateway as a process: `python -m gateway`, or `run` from the command line's code."""

from __future__ import annotations

import os

import uvicorn

from gateway.app import create_app
from shared import logs
from shared.settings import GatewaySettings

#: Seconds that SIGTERM leaves to open requests. Jobs go on; clients of streams come back to another gateway.
SHUTDOWN_GRACE_S = 20
#: Connections that wait to be accepted.
BACKLOG = 2048


def server(settings: GatewaySettings) -> uvicorn.Server:
    """The server, not yet running; `serve` and `run` are uvicorn's."""
    # A thread of ours tokenizes one prompt; threads of the library's own would only contend.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )
    )


def run(settings: GatewaySettings | None = None) -> None:
    """Serve until a signal comes."""
    settings = settings or GatewaySettings()
    logs.configure(settings.log_level, settings.log_json)
    server(settings).run()
