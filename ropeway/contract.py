"""`ropeway protocol`: what services in other languages need to use Redis directly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropeway.console import fail, out
from shared.contract import CONTRACT, DESCRIPTION, export

protocol = typer.Typer(help="The wire protocol, for services in other languages.", no_args_is_help=True)


@protocol.callback()
def _protocol() -> None:
    """Keep `export` a command of its own, though it is the only one."""


@protocol.command("export")
def export_command(
    folder: Annotated[Path, typer.Argument(help="Where the files go; made where it is missing.")],
) -> None:
    """Write every Lua script as a server gets it; and protocol.json: SHA-1s, KEYS and ARGV, names of keys, limits."""
    try:
        count = export(folder)
    except OSError as error:
        fail(f"cannot write into {folder}: {error.strerror or error}")
    out.print(f"contract {CONTRACT}: {count} scripts and {DESCRIPTION} in {folder}", markup=False, soft_wrap=True)
