"""What the commands say to people: results on standard output, all else on standard error, failures in one line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

#: Exit code for wrong options and settings, as of click and argparse.
EXIT_USAGE = 2

#: Of a terminal as wide as anything.
_ANY_WIDTH = 100_000
#: Width from which on a column of prose reads well, and what separates a column from the next one.
_PROSE, _BETWEEN = 24, 3
#: A space at which no line is broken.
_GLUE = "\N{NO-BREAK SPACE}"

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str, *, prose: bool = False) -> None:
    """Print rows as a table where it fits, else as lines: nothing is cut, since other commands take names.

    Args:
        columns: headings; what is in the first column names its row.
        rows: a text for each column; lines leave out those that are empty.
        nothing: what is said where there are no rows.
        prose: the last column has sentences, which a table may fold.
    """
    if not rows:
        out.print(nothing)
        return
    firm, room = len(columns), 0
    if prose:
        firm -= 1
        room = min(_PROSE, max(len(row[firm]) for row in rows) or len(columns[firm])) + _BETWEEN
    if _fits(_table(columns[:firm], rows), room):
        out.print(_table(columns, rows, firm))
        return
    for name, *cells in rows:
        out.print(name, style="bold", markup=False, soft_wrap=True)
        pairs = zip(columns[1:], cells, strict=True)
        said = [
            f"{column}: ".replace(" ", _GLUE) + cell for column, cell in pairs if cell
        ]  # a heading stays with its cell
        out.print(indented("; ".join(said)).replace(_GLUE, " "), markup=False, soft_wrap=True)


def _fits(table: Table, prose: int) -> bool:
    """Whether a table can be shown on standard output without a cell that is folded, and `prose` columns beside it."""
    wide = out.options.update(width=_ANY_WIDTH, max_width=_ANY_WIDTH)
    return Measurement.get(out, wide, table).maximum + prose <= out.width


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], firm: int | None = None) -> Table:
    """The first columns of rows; those behind `firm` may be folded."""
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=firm is None or number < firm, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row[: len(columns)]))
    return table


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
