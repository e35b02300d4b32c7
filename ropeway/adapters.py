"""`ropeway adapters`: LoRA adapters of a gateway, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer

from ropeway.client import Adapter, APIError, Client
from ropeway.console import err, fail, out, show_rows

T = TypeVar("T")

adapters = typer.Typer(help="LoRA adapters: list, show, load, unload.", no_args_is_help=True)

Url = Annotated[str, typer.Option(envvar="ROPEWAY_URL", help="The gateway.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="ROPEWAY_API_KEY", help="API key; to load and unload, an administrator's.")
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]
_URL = "http://127.0.0.1:8000"


@adapters.command("list")
def list_adapters(url: Url = _URL, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show all adapters with their states."""
    found = _run(url, api_key, lambda client: client.adapters())
    if as_json:
        _print([adapter.data for adapter in found])
    else:
        _show(found)


@adapters.command("show")
def show_adapter(name: Name, url: Url = _URL, api_key: ApiKey = None) -> None:
    """Show one adapter, as JSON."""
    _print(_run(url, api_key, lambda client: client.adapter(name)).data)


@adapters.command("load")
def load_adapter(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(help="A folder here, whose two files are uploaded, or owner/name[@revision] of the hub."),
    ],
    url: Url = _URL,
    api_key: ApiKey = None,
    base_model: Annotated[str | None, typer.Option(help="Its model; unset: the one that serves adapters.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Also where the name stands for another one.")] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it in the memory of all workers.")] = False,
    on_server: Annotated[
        bool, typer.Option("--on-server", help="The folder is one that the server may read (adapter_roots).")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is loaded.")] = True,
    as_json: Json = False,
) -> None:
    """Load an adapter, so that requests may name it as their model."""
    folder = Path(source).expanduser()
    local = not on_server and folder.is_dir()
    before = "" if local or on_server else _of_the_hub(source)
    adapter = _run(
        url,
        api_key,
        lambda client: client.load_adapter(
            name,
            folder if local else source,
            base_model=base_model,
            replace=replace,
            pin=pin,
            wait_s=600.0 if wait else 0.0,
        ),
        before,
    )
    if as_json:
        _print(adapter.data)
    elif adapter.state != "failed":
        out.print(f"{adapter.name} is {adapter.state} (version {adapter.data['version']})", soft_wrap=True)
    if adapter.state == "failed":
        fail(f"{adapter.name} could not be loaded: {adapter.error}")


@adapters.command("unload")
def unload_adapter(name: Name, url: Url = _URL, api_key: ApiKey = None) -> None:
    """Unload an adapter: at once for new jobs; those that are queued or running end as they would have."""
    left = _run(url, api_key, lambda client: client.unload_adapter(name))
    out.print(f"{name} is unloaded" + (f", {left} jobs go on with it" if left else ""), soft_wrap=True)


def _show(found: Sequence[Adapter]) -> None:
    columns = ["adapter", "base model", "state", "version", "rank", "MB", "in flight"]
    rows = []
    for adapter in found:
        data = adapter.data
        size = data.get("bytes")
        row = [
            adapter.name + (" (pinned)" if data.get("pinned") else ""),
            adapter.base_model,
            adapter.state,
            str(data["version"]),
            str(data.get("rank") or ""),
            "" if size is None else f"{size / 1e6:.1f}",
            str(data["in_flight"]),
        ]
        rows.append(row)
    errors = [adapter.error or "" for adapter in found]
    if any(errors):
        columns, rows = [*columns, "error"], [[*row, error] for row, error in zip(rows, errors, strict=True)]
    show_rows(columns, rows, "no adapters", prose=any(errors))


def _of_the_hub(source: str) -> str:
    """Say that the hub is asked, since there is no such folder here; what a refusal then begins with.

    What is more likely a mistyped folder ends the command: a hub that is away is asked for minutes.
    """
    parent = source.partition("/")[0]
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        fail(f"{source} is no folder here, and no repository of the hub (owner/name)")
    if Path(parent).is_dir():
        fail(f"there is a folder {parent} here, but none {source}; of the hub it would be hf:{source}")
    if source.startswith("hf:"):
        return ""
    err.print(f"ropeway: there is no folder {source} here; the hub is asked", markup=False, soft_wrap=True)
    return f"{source} is no folder here, and not to be had from the hub: "


def _run(url: str, api_key: str | None, call: Callable[[Client], T], before: str = "") -> T:
    """What a call answers; what the gateway refuses ends the command in one line; that of a source behind `before`."""
    try:
        with Client(url, api_key=api_key) as client:
            return call(client)
    except APIError as error:
        hint = " (--replace)" if error.code == "adapter_loaded" else ""
        fail(f"{before if 'lora_path:' in error.message else ''}{error}{hint}")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        fail(f"{url} is not the URL of a gateway, such as http://127.0.0.1:8000: {error}")
    except httpx.TransportError as error:
        fail(f"cannot reach {url}: {error or type(error).__name__} (`ropeway serve` starts one, --url names one)")


def _print(data: Any) -> None:
    out.out(json.dumps(data, indent=2), highlight=False)
