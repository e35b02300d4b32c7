"""What `ropeway config` shows: every setting of each process, with the value that it has now."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import SecretStr
from rich.markup import escape
from rich.table import Table

from ropeway.console import indented, out
from ropeway.options import build, env_name
from shared.redis_url import mask
from shared.settings import CommonSettings

#: Columns of a terminal from which on a table has room for prose.
_TABLE_COLUMNS = 120


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting; `value` and `default` as JSON holds them, secrets masked."""

    name: str
    env: str
    value: Any
    default: Any
    description: str


def entries(cls: type[CommonSettings]) -> list[Entry]:
    """The settings of one process, in the order of the class."""
    settings = build(cls, {})
    return [
        Entry(
            name,
            env_name(cls, name),
            _shown(name, getattr(settings, name)),
            _shown(name, field.get_default(call_default_factory=True, validated_data={})),
            field.description or "",
        )
        for name, field in cls.model_fields.items()
    ]


def show(processes: Mapping[str, Sequence[Entry]]) -> None:
    """Print a table per process, or lines on a narrow terminal. Values that differ from the default are set off, and
    only there the default is shown.
    """
    if out.width < _TABLE_COLUMNS:
        for process, rows in processes.items():
            _show_lines(process, rows)
    else:
        for table in _tables(processes):
            out.print(table)


def _tables(processes: Mapping[str, Sequence[Entry]]) -> list[Table]:
    made = []
    for process, rows in processes.items():
        table = Table(title=f"ropeway {process}", title_justify="left")
        table.add_column("environment variable", no_wrap=True)
        for column in ("value", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for row in rows:
            changed = row.value != row.default
            style = "bold yellow" if changed else None
            cells = (row.env, _text(row.value), _text(row.default) if changed else "", row.description)
            table.add_row(*(escape(cell) for cell in cells), style=style)
        made.append(table)
    return made


def _show_lines(process: str, rows: Sequence[Entry]) -> None:
    """A line for each setting, its meaning below."""
    out.print(f"ropeway {process}", style="italic")
    for row in rows:
        changed = row.value != row.default
        shown = f"{row.env}={_text(row.value)}" + (f"  (default: {_text(row.default) or 'unset'})" if changed else "")
        out.print(shown, style="bold yellow" if changed else "bold", markup=False, soft_wrap=True)
        out.print(indented(row.description), markup=False, soft_wrap=True)
    out.print()


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, SecretStr):
        return "**********" if value.get_secret_value() else ""
    if isinstance(value, list):
        return [_shown(name, item) for item in value]
    if name.endswith("_url") and value is not None:
        return mask(str(value))
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
