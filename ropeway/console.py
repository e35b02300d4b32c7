"""What the commands say to people: results on standard output, all else on standard error, failures in one line."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

#: Exit code for wrong options and settings, as of click and argparse.
EXIT_USAGE = 2

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """Say why in one line and leave."""
    err.print(f"ropeway: {message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


#: Rooms of this distribution: where one of these is missing, no extra would bring it.
_ROOMS = frozenset({"ropeway", "gateway", "tasks", "worker", "engine", "kernels", "shared"})


def fail_missing(error: ModuleNotFoundError, extra: str) -> NoReturn:
    """Name the extra that brings a missing module; a missing module of our own is a defect and is raised."""
    if error.name is None or error.name.partition(".")[0] in _ROOMS:
        raise error
    fail(f"{error.name} is not installed: pip install 'ropeway[{extra}]'")
