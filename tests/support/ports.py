"""Ports to listen on that nobody else takes."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_given: set[int] = set()


def free_port() -> int:
    """A port on which nothing listens, and never the same again.

    It is below those that the system gives to connections and to whoever asks for any port: one of these could be taken
    by somebody else before the caller listens on it, or while a server that is killed is away.
    """
    while True:
        port = random.randrange(_FIRST, _first_ephemeral())
        with socket.socket() as s:
            # As servers do: what is left of a former one's connections does not count.
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


def _first_ephemeral() -> int:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(path.read_text().split()[0]) if path.exists() else 32_768
    return first if first > _FIRST + 1_000 else 65_536
