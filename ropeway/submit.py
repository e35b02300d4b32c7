"""`ropeway submit`: one prompt over HTTP, for shells and scripts. The answer goes to standard output, and only that."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import httpx

from ropeway.client import APIError, Client, Job
from ropeway.console import err, fail, out

#: Between the answers where several were asked for.
_SEPARATOR = "\n---\n"


@dataclasses.dataclass(frozen=True)
class Order:
    """What to submit, where, and what to wait for."""

    prompt: str
    url: str
    api_key: str | None
    model: str | None
    raw: bool
    stream: bool
    wait: bool
    as_json: bool
    parameters: dict[str, Any]


def submit(order: Order) -> None:
    """Submit a job; print its answer, or without waiting its id. Exit code 1 where it is refused or fails."""
    try:
        with Client(order.url, api_key=order.api_key) as client:
            _submit(client, order)
    except APIError as error:
        fail(f"{error}{_named(error)}")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        fail(f"{order.url} is not the URL of a gateway, such as http://127.0.0.1:8000: {error}")
    except httpx.ConnectError as error:
        fail(f"cannot reach {order.url}: {error or type(error).__name__} (`ropeway serve` starts one, --url names one)")
    except httpx.TransportError as error:
        fail(f"cannot reach {order.url}: {error or type(error).__name__}")


def _named(error: APIError) -> str:
    """The field that is at fault, where the message does not name it. That it is in the body is no news to anybody."""
    name = (error.param or "").removeprefix("body").removeprefix(".")
    said = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error))
    return f" ({name})" if name and not said else ""


def _submit(client: Client, order: Order) -> None:
    model = order.model or _first(client.models())
    job = client.submit(order.prompt, model=model, raw=order.raw, **order.parameters)
    if not order.wait and not order.stream:
        _print(json.dumps(job.data) if order.as_json else job.id)
        return
    try:
        if order.stream:
            job = _follow(client, job, order)
        else:
            job = client.wait(job.id)
            _print(json.dumps(job.data) if order.as_json else _SEPARATOR.join(job.texts))
    except KeyboardInterrupt:
        client.cancel(job.id)
        err.print(f"ropeway: job {job.id} cancelled")
        fail("interrupted", 130)
    if job.error is not None:
        raise job.error
    if job.status != "completed":
        fail(f"job {job.id} is {job.status}")


def _follow(client: Client, job: Job, order: Order) -> Job:
    """Print events, or their text, as they come; answers the ended job."""
    for event in client.events(job.id):
        if order.as_json:
            _print(json.dumps(event.data))
        else:
            out.out(event.text(), end="", highlight=False)
            out.file.flush()
    if not order.as_json:
        _print("")
    return client.wait(job.id, timeout=10.0)


def _first(models: list[str]) -> str:
    if not models:
        fail("the gateway has no model yet; start a worker, or name one with --model")
    return models[0]


def _print(line: str) -> None:
    """As it is: no markup, no wrapping, no colour, so that pipes get exactly this."""
    out.out(line, highlight=False)
