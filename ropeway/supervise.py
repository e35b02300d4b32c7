"""Child processes that start and end together.

A child that ends takes the others with it, and its exit code becomes that of the whole; one that is marked as
restartable is started again instead, once the whole has been ready. The same holds for a server that is watched.
SIGINT and SIGTERM end everything in order, a second one at once. Children run in sessions of their own, so that Ctrl-C
reaches them only from here, and on a leash, so that they end too if this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import IO, Any, Protocol

from ropeway.console import EXIT_USAGE, err
from ropeway.leash import leashed

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
#: A child that ran this long starts again with the first delay.
_STEADY_S = 60.0
_POLL_S = 0.1
#: Seconds that children have to end where a server is lost that they need for ending in order.
_LOST_STOP_S = 2.0
#: Seconds that a companion has for its last word at the end of the whole.
_LAST_WORD_S = 5.0
#: A child that ends with one of these would do so again.
_HOPELESS = frozenset({EXIT_USAGE, os.EX_CONFIG})


class Companion(Protocol):
    """Goes along with a child from start to start."""

    def starts(self) -> Sequence[str]:
        """Arguments of the start that comes now, behind the command's own."""

    async def ended(self, code: int) -> None:
        """The process of the last start is dead, and has been waited for. May be called again.

        Args:
            code: its exit code; 0 where it was told to end, however it did.
        """


class Server(Protocol):
    """A process beside the children, without which they are of no use."""

    @property
    def restartable(self) -> bool:
        """Whether it has what it had once it is started again."""

    def poll(self) -> int | None:
        """The exit code once it has ended."""

    async def restart(self) -> None:
        """Start it again and wait until it answers. What it raises ends the whole."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A child: its name, its command line and its environment.

    Attributes:
        restart: it may be restarted.
        late: it starts once the whole is ready, so that it takes no time from those that are waited for.
        companion: that hears of its starts and ends.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    restart: bool = False
    late: bool = False
    companion: Companion | None = None


class InterruptedBySignalError(Exception):
    """A signal asked for the end before the work was done."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class ChildEndedError(Exception):
    """A child, or what `watched` watches, ended by itself."""

    def __init__(self, name: str, code: int) -> None:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        super().__init__(f"{name} ended {how}")
        self.exit_code = 128 - code if code < 0 else code or 1


class Supervisor:
    """Runs children beside one piece of work and ends them with it."""

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        stop_s: float,
        output: IO[bytes] | None = None,
        watched: Mapping[str, Server] | None = None,
    ) -> None:
        """Prepare; nothing starts yet.

        Args:
            specs: the children, in the order in which they start.
            stop_s: seconds that SIGTERM leaves them before they are killed.
            output: where their standard output and error go; None: where this process's go.
            watched: servers, by name.
        """
        self._specs = specs
        self._stop_s = stop_s
        self._output = output
        self._watched = watched or {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._ready = asyncio.Event()
        self._last_words: set[asyncio.Task[None]] = set()

    def mark_ready(self) -> None:
        """From now on, the end of a restartable child is no reason to end. Those that are to start late start."""
        self._ready.set()

    async def run(self, work: Awaitable[None]) -> None:
        """Run the children until the work is done, then end them.

        Raises:
            InterruptedBySignalError: SIGINT or SIGTERM came first.
            ChildEndedError: a child ended first, and is not to be restarted.
            Exception: whatever the work, or the restart of a server, raises.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        work_task = asyncio.ensure_future(work)
        tasks: set[asyncio.Future[None]] = {work_task, asyncio.create_task(self._interrupted())}
        servers: set[asyncio.Task[None]] = set()
        try:
            for spec in self._specs:
                if not spec.late:
                    await self._start(spec)
                tasks.add(asyncio.create_task(self._start_late(spec) if spec.late else self._keep(spec)))
            servers = {asyncio.create_task(self._watch(name, server)) for name, server in self._watched.items()}
            tasks |= servers
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Where the work and a child end at once, the child's end is the likely cause.
            for task in sorted(done, key=lambda task: task is work_task):
                task.result()
        finally:
            lost = any(task.done() and not task.cancelled() for task in servers)
            await _cancel(tasks)
            await self._stop(_LOST_STOP_S if lost else self._stop_s)
            if not lost:
                await self._hear_last_words()
            await _cancel(self._last_words)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _start(self, spec: Spec) -> None:
        self._processes[spec.name] = await asyncio.create_subprocess_exec(
            *leashed([*spec.command, *(spec.companion.starts() if spec.companion is not None else ())]),
            env=spec.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    async def _start_late(self, spec: Spec) -> None:
        await self._ready.wait()
        await self._start(spec)
        await self._keep(spec)

    async def _keep(self, spec: Spec) -> None:
        delay = _FIRST_DELAY_S
        while True:
            started = time.monotonic()
            code = await self._processes[spec.name].wait()
            if not (spec.restart and self._ready.is_set()) or code in _HOPELESS:
                raise ChildEndedError(spec.name, code)
            if time.monotonic() - started > _STEADY_S:
                delay = _FIRST_DELAY_S
            if spec.companion is not None:
                self._let_speak(spec.companion, code)
            err.print(f"ropeway: {ChildEndedError(spec.name, code)}, starting it again in {delay:g} s", style="yellow")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)
            await self._start(spec)

    async def _interrupted(self) -> None:
        raise InterruptedBySignalError(await self._signals.get())

    async def _watch(self, name: str, server: Server) -> None:
        """Return never. A server that ends is started again at once, and later each time that it does not last."""
        delay = 0.0
        while True:
            started = time.monotonic()
            # Polled: the process is not a child of the event loop.
            while (code := server.poll()) is None:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            ended = ChildEndedError(name, code)
            if not (server.restartable and self._ready.is_set()):
                raise ended
            if time.monotonic() - started > _STEADY_S:
                delay = 0.0
            err.print(f"ropeway: {ended}, starting it again{f' in {delay:g} s' if delay else ''}", style="yellow")
            await asyncio.sleep(delay)
            delay = min(max(2 * delay, _FIRST_DELAY_S), _LONGEST_DELAY_S)
            await server.restart()

    def _let_speak(self, companion: Companion, code: int) -> None:
        """Tell a companion of the end of its child; the restart does not wait for what it does."""
        task = asyncio.create_task(companion.ended(code))
        self._last_words.add(task)
        task.add_done_callback(self._last_words.discard)

    async def _hear_last_words(self) -> None:
        """At the end of the whole: companions whose children did not end in order hear of it too."""
        for spec in self._specs:
            process = self._processes.get(spec.name)
            if spec.companion is not None and process is not None and process.returncode:
                self._let_speak(spec.companion, 0)
        if self._last_words:
            await asyncio.wait(self._last_words, timeout=_LAST_WORD_S)

    async def _stop(self, seconds: float) -> None:
        """SIGTERM to all, then SIGKILL to those left after the time given, or after one more signal."""
        alive = [process for process in self._processes.values() if process.returncode is None]
        for process in alive:
            _send(process, signal.SIGTERM)
        if not alive:
            return
        ended: asyncio.Future[list[int]] = asyncio.gather(*(process.wait() for process in alive))
        impatient = asyncio.create_task(self._signals.get())
        waiting: set[asyncio.Future[Any]] = {ended, impatient}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        for name, process in self._processes.items():
            if process.returncode is None:
                err.print(f"ropeway: {name} did not end in time, killing it", style="yellow")
                _send(process, signal.SIGKILL)
        await ended


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _cancel(tasks: Iterable[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
