"""What the process of one task runs, see `tasks.horse`. Nothing large is imported before it is tied to its parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
#: Seconds between signs of life.
_SIGN_S: Final = 1.0

_channel: socket.socket | None = None


def main() -> None:
    """Do what the order says that comes over the channel; ends the process."""
    _end_with(int(sys.argv[1]))

    from tasks.horse import CHANNEL

    global _channel
    _channel = socket.socket(fileno=CHANNEL)
    line = _channel.makefile("rb").readline()
    _channel.setblocking(False)
    _sign()

    from tasks.horse_task import run

    _sign()
    run(line)


@asynccontextmanager
async def living() -> AsyncIterator[None]:
    """Give signs of life as long as the event loop turns. In a process of another kind it does nothing."""

    async def signs() -> None:
        while True:
            _sign()
            await asyncio.sleep(_SIGN_S)

    task = asyncio.create_task(signs(), name="signs of life")
    try:
        yield
    finally:
        task.cancel()


def _sign() -> None:
    if _channel is not None:
        with suppress(BlockingIOError, ConnectionError):  # the parent reads seldom, or does not want to know any more
            _channel.send(b".")


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was said
        sys.exit(1)
