"""What the commands say to people: results on standard output, all else on standard error, failures in one line."""

from __future__ import annotations

import textwrap
from typing import NoReturn

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

#: Exit code for wrong options and settings, as of click and argparse.
EXIT_USAGE = 2

#: Of a terminal as wide as anything.
_ANY_WIDTH = 100_000

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def fits(table: Table, prose: int = 0) -> bool:
    """Whether a table can be shown on standard output without a cell that is folded, and `prose` columns beside it."""
    wide = out.options.update(width=_ANY_WIDTH, max_width=_ANY_WIDTH)
    return Measurement.get(out, wide, table).maximum + prose <= out.width


def indented(text: str, indent: int = 4) -> str:
    """Prose as a paragraph that fits standard output; a word that does not stays whole."""
    margin = " " * indent
    width = max(out.width, 40)
    return textwrap.fill(
        text, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


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
