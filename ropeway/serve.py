"""All in one: Redis, a gateway, a worker and background tasks as child processes of one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
from rich.markup import escape

from ropeway.client import APIError, AsyncClient
from ropeway.console import err, fail, out
from ropeway.embedded import EmbeddedRedis, EmbeddedRedisError
from ropeway.heirs import Heirs
from ropeway.options import Given, as_environment, build, flag, unknown_variables
from ropeway.supervise import ChildEndedError, InterruptedBySignalError, Spec, Supervisor
from shared.errors import InvalidRequestError
from shared.redis_url import mask
from shared.settings import GatewaySettings, TasksSettings, WorkerSettings
from shared.task_queue import tasks_url

_PROBE_S = 0.1
#: Seconds that children have to end beyond the worker's own grace period.
_STOP_MARGIN_S = 10.0
#: Exit code of a worker that cannot serve with its settings.
_REFUSED = 78
#: HTTP status of an answer to a request without a key.
_NO_KEY = 401


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything listens, and with which settings it runs."""

    gateway: GatewaySettings
    worker: WorkerSettings
    tasks: TasksSettings
    given: Given

    @classmethod
    def of(cls, given: Given, redis_url: str) -> Layout:
        """Settings of all processes; port 0 becomes a free one, since this process must know it. The port of the
        background tasks is a free one unless it is said.
        """
        given = {**given, "redis_url": redis_url}
        gateway, worker = build(GatewaySettings, given), build(WorkerSettings, given)
        given["port"] = _listenable(gateway.host, gateway.port, "port")
        given["health_port"] = _listenable(worker.health_host, worker.health_port, "health_port")
        tasks = build(TasksSettings, given)
        said = "tasks_health_port" in tasks.model_fields_set
        port = tasks.tasks_health_port if said else 0
        given["tasks_health_port"] = _listenable(tasks.tasks_health_host, port, "tasks_health_port")
        return cls(build(GatewaySettings, given), build(WorkerSettings, given), build(TasksSettings, given), given)

    @property
    def url(self) -> str:
        """Where a client on this machine finds the gateway."""
        return _url(self.gateway.host, self.gateway.port)

    def client(self) -> AsyncClient:
        """A client of the gateway, with the first of its settings' keys."""
        keys = [*self.gateway.api_keys, *self.gateway.admin_api_keys]
        return AsyncClient(self.url, api_key=keys[0].get_secret_value() if keys else None)

    def supervisor(self, redis: EmbeddedRedis | None, output: IO[bytes] | None = None) -> Supervisor:
        """What runs gateway, worker and background tasks, and watches the embedded server."""
        ropeway = [sys.executable, "-m", "ropeway"]
        unknown = unknown_variables(os.environ)  # said once, not again by each child
        env = {name: value for name, value in os.environ.items() if name not in unknown}
        env |= as_environment(self.given)
        specs = [
            Spec("gateway", [*ropeway, "gateway"], env),
            Spec("worker", [*ropeway, "worker"], env, restart=True, companion=self._heirs()),
        ]
        if self._has_tasks():
            # Adapters may be loaded at once, which needs it there; a batch may wait a moment.
            late = not self.worker.enable_lora
            specs.append(Spec("tasks", [*ropeway, "tasks"], env, restart=True, late=late))
        return Supervisor(
            specs,
            stop_s=self.worker.grace_s + _STOP_MARGIN_S,
            output=output,
            watched={} if redis is None else {"Redis": redis},
        )

    def _heirs(self) -> Heirs:
        return Heirs(self.worker.redis_url, self.worker.max_attempts)

    def _has_tasks(self) -> bool:
        """Whether background tasks have a place; where they have none, all works but batches and loading adapters."""
        try:
            tasks_url(self.tasks)
        except InvalidRequestError as error:
            why = f"ropeway: no batches run, and no adapters can be loaded: {error.message}"
            err.print(why, style="yellow", markup=False, soft_wrap=True)
            return False
        return True

    async def ready(self) -> None:
        """Wait until the gateway takes requests and the worker has its model."""
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
            await _answers(http, f"{self.url}/ready")
            await _answers(http, f"{_url(self.worker.health_host, self.worker.health_port)}/ready")


@contextlib.contextmanager
def redis_for(url: str | None, data_dir: Path | None) -> Iterator[tuple[str, EmbeddedRedis | None]]:
    """The given Redis, or an embedded one: with jobs kept in `data_dir`, or for this once where that is None."""
    if url is not None:
        yield url, None
        return
    try:
        embedded = EmbeddedRedis(data_dir)
        embedded.start()
    except EmbeddedRedisError as error:
        fail(str(error))
    try:
        yield embedded.url, embedded
    finally:
        embedded.stop()


def serve(given: Given, redis_url: str | None, data_dir: Path) -> None:
    """Run until a signal comes or a part ends for good."""
    with redis_for(redis_url, data_dir) as (url, embedded):
        layout = Layout.of(given, url)
        supervisor = layout.supervisor(embedded)
        try:
            asyncio.run(supervisor.run(_announce(layout, supervisor, embedded)))
        except InterruptedBySignalError as error:
            err.print(f"ropeway: ended by {error}")
        except ChildEndedError as error:
            fail(f"{error}{_hint(error, data_dir if embedded else None)}", error.exit_code)
        except EmbeddedRedisError as error:
            fail(f"Redis has ended and does not come up again: {error}")


def _hint(error: ChildEndedError, data_dir: Path | None) -> str:
    """What to do where a worker does not fit to jobs that are kept."""
    if error.exit_code != _REFUSED or data_dir is None:
        return ""
    return (
        f": see above. If its settings differ from those of jobs that are kept in {data_dir}, start it once more as "
        "before and let them end, or take another --data-dir"
    )


async def _announce(layout: Layout, supervisor: Supervisor, embedded: EmbeddedRedis | None) -> None:
    """Say where it is and how to use it, then stay until cancelled."""
    await layout.ready()
    supervisor.mark_ready()
    model = await _first_model(layout)
    where = f"in {embedded.data_dir}" if embedded is not None else f"in {mask(layout.gateway.redis_url)}"
    out.print(
        f"\nRopeway serves [bold]{escape(model)}[/] on [bold]{layout.url}[/] (jobs {escape(where)})\n", soft_wrap=True
    )
    out.print(_example(layout, model), markup=False, soft_wrap=True)
    out.file.flush()
    await asyncio.Event().wait()


async def _first_model(layout: Layout) -> str:
    async with layout.client() as client:
        try:
            names = await client.models()
        except APIError as error:
            if error.status == _NO_KEY and layout.gateway.keys_required:
                return layout.worker.model  # the keys that open it are not here
            fail(f"the gateway does not list its models: {error}")
    return names[0] if names else layout.worker.model


def _example(layout: Layout, model: str) -> str:
    question = {"role": "user", "content": "What is a ropeway?"}
    body = {"model": model, "stream": True, "max_tokens": 200, "temperature": 0, "messages": [question]}
    lines = [f"curl -N {layout.url}/v1/chat/completions -H 'Content-Type: application/json'"]
    if layout.gateway.keys_required:
        lines.append('-H "Authorization: Bearer $YOUR_KEY"')
    lines.append(f"-d {shlex.quote(json.dumps(body))}")
    return "  " + " \\\n    ".join(lines) + "\n"


async def _answers(http: httpx.AsyncClient, url: str) -> None:
    """Return once the address answers 200. There is no time limit: a model may have to be fetched first."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get(url)).status_code == httpx.codes.OK:
                return
        await asyncio.sleep(_PROBE_S)


def _url(host: str, port: int) -> str:
    """URL from this machine of what listens on an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listenable(host: str, port: int, setting: str) -> int:
    """The port, or a free one for 0, where it can be listened on now.

    Looked at beforehand: otherwise another program's answers on that port would pass for those of a child that is
    about to fail.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            found: int = probe.getsockname()[1]
            return found
    except OSError as error:
        why = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        fail(f"{why} ({flag(setting)} takes another one, with 0 any that is free)")
