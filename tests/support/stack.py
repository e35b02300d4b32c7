"""The whole system as real processes: a Redis server, gateways and workers, on free ports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from shared import keys
from shared.protocol import Card, decode
from tests.support.at_rest import assert_at_rest, end_live
from tests.support.ports import free_port as free_port
from tests.support.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A child with its log in a file. It runs the code of a folder."""

    def __init__(self, name: str, args: list[str], env: dict[str, str], code: Path = ROOT) -> None:
        self.name = name
        self.log = Path(tempfile.mkdtemp(prefix=f"rw-{name}-")) / "log"
        with self.log.open("wb") as out:
            # PYTHONPATH: before what is installed, whichever version that is.
            env = {**os.environ, "PYTHONPATH": str(code), **env}
            self.popen = subprocess.Popen(args, cwd=code, env=env, stdout=out, stderr=out)

    def stop(self, how: int = signal.SIGTERM, timeout: float = 30) -> int:
        """Signal it and wait; the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise

    def text(self) -> str:
        """What it has logged so far."""
        return self.log.read_text(errors="replace")


class Stack:
    """One Redis, any number of gateways and workers. Use as a context manager.

    Args:
        clean: in the end bring all pools to rest, and check that nothing is left of them.
        worker: settings of workers.
    """

    def __init__(
        self, *, redis_kind: str = "valkey", appendonly: bool = False, clean: bool = False, **worker: object
    ) -> None:
        self.redis = RedisServer(redis_kind, appendonly=appendonly)
        self._clean = clean
        self.worker_settings = {k: str(v) for k, v in worker.items()}
        self.processes: list[Process] = []
        self.gateway_port = free_port()

    @property
    def url(self) -> str:
        """Base URL of the first gateway."""
        return f"http://127.0.0.1:{self.gateway_port}"

    def __enter__(self) -> Stack:
        self.redis.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._clean and kind is None:
                self._rest()
        finally:
            for process in reversed(self.processes):
                if process.popen.poll() is None:
                    process.popen.kill()
                    process.popen.wait()
            self.redis.close()

    def _rest(self) -> None:
        """End all jobs, workers and gateways as one should, and look at what is left."""
        with self.redis.client() as client:
            pools = [name.decode() for name in client.smembers(keys.pools())]  # type: ignore[union-attr]
            cards = [decode(client.hget(keys.card(pool), "card"), Card) for pool in pools]  # type: ignore[arg-type]
        for pool in pools:
            asyncio.run(end_live(self.redis.url, pool))
        for process in reversed(self.processes):
            process.stop()
        for card in cards:
            asyncio.run(assert_at_rest(self.redis.url, card.pool, card.lanes))

    def start_gateway(self, port: int | None = None, *, code: Path = ROOT, **settings: object) -> Process:
        """Start a gateway, on the stack's own port by default, of the version that `code` holds."""
        env = self._env(settings | {"port": port or self.gateway_port})
        process = Process("gateway", [sys.executable, "-m", "gateway"], env, code)
        self.processes.append(process)
        return process

    def start_worker(self, module: str = "worker", *, code: Path = ROOT, **settings: object) -> tuple[Process, int]:
        """Start a worker, or another module that runs one, of the version that `code` holds.

        Answers it and the port of its /health.
        """
        port = free_port()
        env = self._env(self.worker_settings | settings | {"health_port": port})
        process = Process("worker", [sys.executable, "-m", module], env, code)
        self.processes.append(process)
        return process, port

    def wait_ready(self, timeout: float = 120, port: int | None = None, path: str = "/ready") -> None:
        """Until the gateway, or whoever has the port, answers /ready, or another path, well.

        Raises:
            RuntimeError: a process ended, or time is up; the message holds the ends of the logs.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{port or self.gateway_port}{path}", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            dead = [p for p in self.processes if p.popen.poll() is not None]
            if dead:
                raise RuntimeError("\n".join(f"{p.name} ended\n{p.text()[-3000:]}" for p in dead))
            time.sleep(0.1)
        raise RuntimeError("\n".join(f"{p.name}:\n{p.text()[-2000:]}" for p in self.processes))

    def _env(self, settings: dict[str, object]) -> dict[str, str]:
        env = {f"ROPEWAY_{k.upper()}": v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
        return {"ROPEWAY_REDIS_URL": self.redis.url, **env}
