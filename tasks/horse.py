"""The process of one task as its parent has it: how it is started, and whether it still gives signs of life.

It is a program of its own and no fork. The parent has threads (keeper, webhooks, probes, traces), and a fork leaves
locked for ever whatever one of them holds at that moment: the lock of a module that is being imported, of a pool of
connections, of a library.

Both have a socket: what is to be done goes down in one line, signs of life come up as bytes.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, Final

import msgspec

from shared.settings import TasksSettings

#: What runs there, with this process's own places of modules: whatever lies in the working folder is none of them.
_PROGRAM: Final = "import sys; sys.path[:] = sys.argv[2:]; from tasks.horse_main import main; main()"
#: The descriptor of the process's end of the socket: nobody types anything there.
CHANNEL: Final = 0
_READ_BYTES: Final = 4096


class Order(msgspec.Struct, frozen=True):
    """What a process is to do.

    Attributes:
        settings: those of `TasksSettings` that tasks need, in JSON's types.
        worker, job, execution: RQ's names.
        log_level: RQ's.
    """

    settings: dict[str, Any]
    worker: str
    job: str
    execution: str
    log_level: str


class Horse:
    """One process. It leads a process group of its own, and ends with the thread that makes this."""

    def __init__(self, order: Order) -> None:
        self._channel, its_end = socket.socketpair()
        try:
            with its_end:
                self._channel.sendall(msgspec.json.encode(order) + b"\n")
                self._channel.setblocking(False)
                self.pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-c", _PROGRAM, str(os.getpid()), *sys.path],
                    os.environ,
                    file_actions=[(os.POSIX_SPAWN_DUP2, its_end.fileno(), CHANNEL)],
                    setpgroup=0,
                )
        except OSError:
            self.close()
            raise

    def gave_sign(self) -> bool:
        """Whether there was a sign of life since this was last asked."""
        seen = False
        while True:
            try:
                signs = self._channel.recv(_READ_BYTES)
            except (BlockingIOError, ConnectionError):
                return seen
            if not signs:  # it has ended
                return seen
            seen = True

    def close(self) -> None:
        """Forget it."""
        self._channel.close()


def settings_of(settings: TasksSettings) -> dict[str, Any]:
    """What goes into an order. Webhooks are sent by the parent alone: what signs them stays there."""
    return settings.model_dump(mode="json", exclude={"webhook_secrets"})
