"""Child processes that measure: they load once, answer commands, and are stopped while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).with_name("peer_scripts")
_LOG_TAIL = 3000
_STOP_S = 20.0
#: What the engine sets for itself on import.
_ENGINES_OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class PeerError(RuntimeError):
    """A child failed; the message holds the end of what it wrote to stderr."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: that of this process, but without what the engine sets for itself on import."""
    kept = {key: value for key, value in os.environ.items() if key not in _ENGINES_OWN}
    return kept | dict(extra or {})


class Child:
    """A process group of its own that can be held still."""

    def __init__(self, name: str, args: Sequence[str], env: Mapping[str, str], *, piped: bool = False) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        pipe = subprocess.PIPE if piped else None
        self.popen = subprocess.Popen(
            args,
            env=dict(env),
            stdin=pipe if piped else subprocess.DEVNULL,
            stdout=pipe if piped else self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hold(self) -> None:
        """Stop the whole group: a loaded engine that waits takes no time from others then."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the group, kindly at first, and wait."""
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.go_on()
        self._signal(signal.SIGTERM)
        try:
            self.popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # What the leader has left behind, if anything.
            self._signal(signal.SIGKILL)
            self.popen.wait()
            self._log.close()

    def check(self) -> None:
        """Raise `PeerError` if it has ended."""
        if self.popen.poll() is not None:
            raise self.failure(f"ended with status {self.popen.returncode}")

    def failure(self, what: str) -> PeerError:
        """An error with the end of the log."""
        return PeerError(f"{self.name}: {what}\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The end of what it wrote."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


class ScriptChild(Child):
    """One of our scripts under some Python: a line of JSON in, a line of JSON out.

    Attributes:
        ready: what it said of itself when it had loaded.

    Raises:
        PeerError: it ended before it was ready, or said what is no JSON.
    """

    def __init__(
        self, name: str, script: str, settings: Mapping[str, Any], *, python: str | None = None, **env: str
    ) -> None:
        path = {"PYTHONPATH": str(ROOT)} if python is None else {}
        args = [python or sys.executable, str(SCRIPTS / f"{script}.py"), json.dumps(settings)]
        super().__init__(name, args, environment(path | env), piped=True)
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self._stdin: IO[bytes] = self.popen.stdin
        self._stdout: IO[bytes] = self.popen.stdout
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            PeerError: it ended, or answered what is no JSON object.
        """
        try:
            self._stdin.write(json.dumps(command).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self.failure("takes no more commands") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            raise self.failure("gave no answer")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self.failure(f"answered {line!r}") from error
        if not isinstance(answer, dict):
            raise self.failure(f"answered {line!r}")
        return answer


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that keeps one core busy and touches no memory to speak of."""
    with Child("neighbour", [sys.executable, "-c", "while True: pass"], environment()):
        yield
