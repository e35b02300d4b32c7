"""The command `ropeway`."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from typing import Annotated, Any, Literal

import typer

import ropeway
from ropeway.adapters import adapters
from ropeway.console import EXIT_USAGE, fail, fail_missing, out

app = typer.Typer(
    name="ropeway",
    help="Message-queue-driven inference for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


#: The extra that each command needs.
_EXTRAS = {
    "gateway": "gateway",
    "worker": "worker",
    "tasks": "tasks",
    "serve": "demo",
    "demo": "demo",
    "config": "gateway",
    "dead": "gateway",
    "pool": "gateway",
    "protocol": "gateway",
    "keys": "gateway",
    "tenants": "gateway",
    "webhooks": "gateway",
}
#: Fields of a request that `ropeway submit` sets itself, from its argument and its options.
_OWN_FIELDS = frozenset({"messages", "model", "prompt", "raw", "self", "stream"})


@app.command()
def version() -> None:
    """Show the version."""
    out.print(f"ropeway {ropeway.__version__} (Python {platform.python_version()})")


@app.command()
def doctor(
    redis: Annotated[
        str | None,
        typer.Option(
            "--redis",
            envvar="ROPEWAY_REDIS_URL",
            help="Look at this Redis and its pools too; unset: at that of a `ropeway serve` on this machine.",
        ),
    ] = None,
) -> None:
    """What computes on this machine, and why; of a Redis and its pools, what is to be mended (exit code 1)."""
    from shared.errors import InvalidRequestError

    try:
        from ropeway.doctor import doctor as run
        from ropeway.redis_commands import redis_of_serve

        code = run(redis_of_serve() if redis is None else redis)
        if code:
            raise typer.Exit(code)
    except InvalidRequestError as error:
        fail(error.message, EXIT_USAGE)
    except ModuleNotFoundError as error:
        fail_missing(error, "worker")
    except ValueError as error:  # a setting that cannot be served
        fail(str(error), EXIT_USAGE)


@app.command()
def submit(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    model: Annotated[str | None, typer.Option(help="Model; unset: the first that the gateway lists.")] = None,
    url: Annotated[str, typer.Option(envvar="ROPEWAY_URL", help="The gateway.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="ROPEWAY_API_KEY", help="API key.", show_envvar=True)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template around it.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the answer, or print the job's id.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the job, or each event, as JSON.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    job_class: Annotated[
        Literal["high", "normal", "batch"] | None,
        typer.Option("--class", help="Which jobs come first; unset: normal.", show_default=False),
    ] = None,
    delay_s: Annotated[
        float | None, typer.Option("--delay", metavar="SECONDS", help="Until it may start; unset: at once.")
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option("--deadline", metavar="SECONDS", help="From then until it must have ended; unset: the gateway's."),
    ] = None,
    callback_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Told, as a webhook, when the job has ended.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME=JSON", help="A further field of the request; may be repeated.")
    ] = None,
) -> None:
    """Submit a job to a gateway over HTTP, and print its answer."""
    from ropeway.submit import Order
    from ropeway.submit import submit as run

    named: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    named |= {"job_class": job_class, "delay_s": delay_s, "deadline_s": deadline_s, "callback_url": callback_url}
    parameters = {name: value for name, value in named.items() if value is not None}
    parameters |= dict(_field(text) for text in field or ())
    if stream and not as_json and parameters.get("n") not in (None, 1):
        fail("--stream prints one answer: with several, take --json", EXIT_USAGE)
    run(
        Order(
            prompt=sys.stdin.read() if prompt == "-" else prompt,
            url=url,
            api_key=api_key,
            model=model,
            raw=raw,
            stream=stream,
            wait=wait,
            as_json=as_json,
            parameters=parameters,
        )
    )


def _field(text: str) -> tuple[str, Any]:
    """`ignore_eos=true` as a name and a value."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        fail(f"--field {text}: NAME=JSON is needed", EXIT_USAGE)
    if name in _OWN_FIELDS:
        fail(f"--field {text}: the command sets {name} itself, see --help", EXIT_USAGE)
    try:
        return {"class": "job_class"}.get(name, name), json.loads(value)
    except ValueError as error:
        quoted = shlex.quote(f"{name}={json.dumps(value)}")
        hint = f"; a text needs quotes: --field {quoted}" if value[:1] not in '[{"' else f": {error}"
        fail(f"--field {text}: what follows {name}= is not JSON{hint}", EXIT_USAGE)


def _add_processes() -> None:
    """The commands made of settings; where their libraries are missing, they only say which extra brings them."""
    try:
        from ropeway.contract import protocol
        from ropeway.keys import keys
        from ropeway.operate import dead, pool
        from ropeway.processes import commands
        from ropeway.tenants import tenants
        from ropeway.webhooks import webhooks
    except ModuleNotFoundError as error:
        for name, extra in _EXTRAS.items():
            _add_unavailable(name, extra, error)
    else:
        app.add_typer(commands)
        app.add_typer(dead, name="dead")
        app.add_typer(pool, name="pool")
        app.add_typer(protocol, name="protocol")
        app.add_typer(keys, name="keys")
        app.add_typer(tenants, name="tenants")
        app.add_typer(webhooks, name="webhooks")


def _add_unavailable(name: str, extra: str, error: ModuleNotFoundError) -> None:
    @app.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def unavailable() -> None:
        fail_missing(error, extra)

    unavailable.__doc__ = f"Needs pip install 'ropeway[{extra}]'."


app.add_typer(adapters, name="adapters")
_add_processes()


def main() -> None:
    """Entry point of the command."""
    app()
