"""The commands whose options are the settings of our processes. Needs pydantic-settings, which every extra brings."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from ropeway import embedded
from ropeway.console import fail, fail_missing, out
from ropeway.options import Given, build, with_settings
from shared.settings import CommonSettings, GatewaySettings, TasksSettings, WorkerSettings

commands = typer.Typer()


def _owner(given: str | None) -> str | None:
    """What a supervisor calls the one process that it starts; no setting, since no second one may ever have it."""
    if given is not None and re.fullmatch(r"[0-9a-f]{32}", given) is None:
        raise typer.BadParameter("32 hexadecimal digits are needed, new ones for each process")
    return given


@commands.command("gateway")
@with_settings(GatewaySettings)
def gateway_command(given: Given) -> None:
    """Run the HTTP gateway."""
    settings = build(GatewaySettings, given)
    try:
        from gateway.main import run
    except ModuleNotFoundError as error:
        fail_missing(error, "gateway")
    run(settings)


@commands.command("worker")
@with_settings(WorkerSettings)
def worker_command(
    given: Given,
    owner: Annotated[str | None, typer.Option(hidden=True, callback=_owner)] = None,
) -> None:
    """Run a worker: it pulls jobs and generates."""
    settings = build(WorkerSettings, given)
    if settings.engine != "sim":
        _needs("torch", "worker")
    try:
        from worker.main import run
    except ModuleNotFoundError as error:
        fail_missing(error, "worker")
    raise typer.Exit(run(settings, owner=owner))


@commands.command("tasks")
@with_settings(TasksSettings)
def tasks_command(given: Given) -> None:
    """Run background tasks: they load LoRA adapters and run batches."""
    settings = build(TasksSettings, given)
    try:
        from tasks.main import run
    except ModuleNotFoundError as error:
        fail_missing(error, "tasks")
    raise typer.Exit(run(settings))


@commands.command("serve")
@with_settings(GatewaySettings, TasksSettings, WorkerSettings, unset={"redis_url": "embedded"})
def serve_command(
    given: Given,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded Redis keeps jobs; unset: the user's data folder.")
    ] = None,
) -> None:
    """Run Redis, a gateway, a worker and a process for background tasks together.

    Without --redis (or ROPEWAY_REDIS_URL) an embedded server is started, whose jobs survive a restart.
    """
    _needs("fastapi", "gateway")
    from ropeway.serve import serve

    rest = dict(given)
    redis_url = rest.pop("redis_url", None) or os.environ.get("ROPEWAY_REDIS_URL")
    try:
        serve(rest, redis_url, data_dir or embedded.default_data_dir())
    except embedded.EmbeddedRedisError as error:
        fail(str(error))


@commands.command("demo")
@with_settings(WorkerSettings, unset={"redis_url": "embedded"})
def demo_command(
    given: Given,
    prompt: Annotated[str | None, typer.Option(help="What to ask; unset: a question about ropeways.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 96,
) -> None:
    """Ask one question through the whole system, show the answer and what it took.

    Without --redis a server of its own is started, whatever ROPEWAY_REDIS_URL says.
    """
    _needs("fastapi", "gateway")
    from ropeway.demo import DEFAULT_PROMPT, Question, demo

    rest = dict(given)
    demo(rest, rest.pop("redis_url", None), Question(prompt or DEFAULT_PROMPT, max_tokens))


@commands.command("config")
def config_command(
    process: Annotated[
        Literal["gateway", "tasks", "worker"] | None, typer.Argument(help="One process only.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show every setting: environment variable, value, meaning, and the default where the value is another one."""
    from ropeway.settings_table import entries, show

    classes: dict[str, type[CommonSettings]] = {
        "gateway": GatewaySettings,
        "tasks": TasksSettings,
        "worker": WorkerSettings,
    }
    found = {name: entries(cls) for name, cls in classes.items() if process in (None, name)}
    if as_json:
        plain = {name: [dataclasses.asdict(entry) for entry in rows] for name, rows in found.items()}
        out.out(json.dumps(plain, indent=2), highlight=False)
        return
    show(found)


def _needs(module: str, extra: str) -> None:
    """Fail early where a child process would."""
    if importlib.util.find_spec(module) is None:
        fail_missing(ModuleNotFoundError(name=module), extra)
