"""Runs a command that ends when its parent does, even if the parent is killed.

    python -I -S leash.py PARENT_PID COMMAND [ARGUMENT ...]

A file of its own, run before the command replaces it, because only a process itself can ask the kernel for this, and
running Python between fork and exec (`preexec_fn`) may deadlock a parent that has threads. Linux only; elsewhere the
command simply runs. Standard library only, so that it starts in some 20 ms.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` on a leash held by this process.

    The signal comes when the *thread* that started the child ends, so start it from one that lives as long as needed.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def main(arguments: Sequence[str]) -> None:
    """Ask for SIGTERM at the parent's death, then become the command."""
    parent, command = int(arguments[0]), list(arguments[1:])
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request took effect
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
