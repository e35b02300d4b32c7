"""Redis, gateways and workers as processes, each behind a network of its own; what dies is started again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import httpx

from tests.support.ports import free_port
from tests.support.redis_proxy import RedisProxy
from tests.support.redis_server import RedisServer, binary
from tests.support.stack import ROOT
from tests.support.worker_harness import send_signal

#: Seconds from a process's end to its next start.
RESTART_S = 0.2
#: Seconds that the whole fleet may take to be ready.
PATIENCE_S = 180.0


class Member:
    """One gateway or worker over all of its lives.

    Attributes:
        proxy: between it and Redis.
        expected: exit codes that this life may end with.
        paused: stopped by SIGSTOP.
        lives: how often it was started.
    """

    def __init__(self, name: str, module: str, env: Mapping[str, str], proxy: RedisProxy, port: int, log: Path) -> None:
        self.name, self.proxy = name, proxy
        self.url = f"http://127.0.0.1:{port}"
        self.expected: set[int] = set()
        self.paused = False
        self.lives = 0
        self._module, self._env, self._folder = module, env, log
        self._process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Begin a life."""
        self.lives += 1
        self.expected, self.paused = set(), False
        env = {**os.environ, **self._env, "ROPEWAY_REDIS_URL": self.proxy.url}
        with self.log.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, cwd=ROOT, env=env, stdout=out, stderr=out
            )

    @property
    def log(self) -> Path:
        """Of this life."""
        return self._folder / f"{self.name}.{self.lives}.log"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    @property
    def owner(self) -> str | None:
        """A worker's owner in this life; None before it has logged it."""
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                owner = json.loads(line).get("owner")
            except ValueError:
                continue
            if owner is not None:
                return str(owner)
        return None

    def signal(self, number: signal.Signals, *codes: int) -> None:
        """Send a signal, if it lives; this life may end with these exit codes."""
        self.expected.update(codes)
        if not self.alive:
            return
        send_signal(self._process, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.paused = number is signal.SIGSTOP

    async def wait(self) -> int:
        """The exit code of this life."""
        return await self._process.wait()

    async def ready(self, http: httpx.AsyncClient) -> bool:
        """Whether it serves."""
        if not self.alive or self.paused:
            return False
        try:
            return (await http.get(f"{self.url}/ready", timeout=2)).status_code == 200
        except httpx.TransportError:
            return False


class Fleet:
    """A pool of processes. Use as an async context manager.

    Args:
        worker, gateway: settings by field name.
        appendfsync: of Redis.
        keep_logs: do not delete the folder of logs.

    Attributes:
        folder: of logs; it stays where something went wrong.
        crashes: ends of processes that nobody had asked for.
    """

    def __init__(
        self,
        *,
        workers: int,
        gateways: int,
        worker: Mapping[str, object],
        gateway: Mapping[str, object],
        appendfsync: str = "no",
        keep_logs: bool = False,
    ) -> None:
        kind = "redis" if binary("redis") else "valkey"
        self.redis = RedisServer(kind, appendonly=True, extra=["--appendfsync", appendfsync])
        self.folder = Path(tempfile.mkdtemp(prefix="rw-chaos-"))
        self.workers: list[Member] = []
        self.gateways: list[Member] = []
        self.crashes: list[str] = []
        self._counts, self._keep_logs = (workers, gateways), keep_logs
        self._settings = _env(worker), _env(gateway)
        self._keepers: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()
        self._http = httpx.AsyncClient()

    @property
    def members(self) -> Sequence[Member]:
        """Gateways and workers."""
        return [*self.gateways, *self.workers]

    @property
    def urls(self) -> list[str]:
        """Of the gateways."""
        return [gateway.url for gateway in self.gateways]

    async def __aenter__(self) -> Fleet:
        await asyncio.to_thread(self.redis.start)
        workers, gateways = self._counts
        for number in range(gateways):
            self.gateways.append(await self._member(f"gateway-{number}", "gateway", self._settings[1], "PORT"))
        for number in range(workers):
            module = "tests.support.chaos.worker"
            self.workers.append(await self._member(f"worker-{number}", module, self._settings[0], "HEALTH_PORT"))
        for member in self.members:
            await member.start()
            self._keepers.append(asyncio.create_task(self._keep(member)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for member in self.members:
            member.signal(signal.SIGKILL)
            await member.wait()
        await self._stack.aclose()
        await self._http.aclose()
        await asyncio.to_thread(self.redis.close)
        if not (self._keep_logs or self.crashes) and kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def wait_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Until all members serve.

        Raises:
            RuntimeError: they do not; with the ends of the logs.
        """
        until = time.monotonic() + timeout_s
        while not all([await member.ready(self._http) for member in self.members]):
            if time.monotonic() > until:
                logs = [f"{m.name}:\n{m.log.read_text(errors='replace')[-1500:]}" for m in self.members]
                raise RuntimeError("not all processes are ready\n" + "\n".join(logs))
            await asyncio.sleep(0.1)

    async def restart_redis(self, pause_s: float) -> None:
        """SIGKILL, and a start from what is on disk."""
        await asyncio.to_thread(self.redis.kill)
        await asyncio.sleep(pause_s)
        await asyncio.to_thread(self.redis.start)

    async def _member(self, name: str, module: str, env: Mapping[str, str], port_name: str) -> Member:
        proxy = await self._stack.enter_async_context(RedisProxy(self.redis.url))
        port = free_port()
        return Member(name, module, {**env, f"ROPEWAY_{port_name}": str(port)}, proxy, port, self.folder)

    async def _keep(self, member: Member) -> None:
        while True:
            code = await member.wait()
            if code not in member.expected:
                self.crashes.append(f"{member.name} ended with exit code {code}, see {member.log}")
            await asyncio.sleep(RESTART_S)
            await member.start()


def _env(settings: Mapping[str, object]) -> dict[str, str]:
    return {f"ROPEWAY_{k.upper()}": v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
