"""A process's logs as Ropeway sets them up, for tests that look for what must not be in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from shared import logs


@contextmanager
def logged(level: str) -> Iterator[None]:
    """JSON lines of this level and above on standard error, without those of the client that is in this process too."""
    root, client = logging.getLogger(), logging.getLogger("httpx")
    foreign = [logging.getLogger(name) for name in ("httpcore", "asyncio")]
    handlers, root_level, disabled = root.handlers[:], root.level, client.disabled
    propagated = [logger.propagate for logger in foreign]
    logs.configure(level, True)
    client.disabled = True
    for logger in foreign:
        logger.propagate = False
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(root_level)
        client.disabled = disabled
        for logger, before in zip(foreign, propagated, strict=True):
            logger.propagate = before
