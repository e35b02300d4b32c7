"""Child processes that start and end together.

A child that ends takes the others with it, and its exit code becomes that of the whole; one that is marked as
restartable is started again instead, once the whole has been ready. SIGINT and SIGTERM end everything in order, a
second one at once. Children run in sessions of their own, so that Ctrl-C reaches them only from here, and on a leash,
so that they end too if this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from ropeway.console import EXIT_USAGE, err
from ropeway.leash import leashed

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
#: A child that ran this long starts again with the first delay.
_STEADY_S = 60.0
_POLL_S = 0.2
#: A child that ends with one of these would do so again.
_HOPELESS = frozenset({EXIT_USAGE, os.EX_CONFIG})


@dataclasses.dataclass(frozen=True)
class Spec:
    """A child: its name, its command line and its environment.

    Attributes:
        restart: it may be restarted.
        late: it starts once the whole is ready, so that it takes no time from those that are waited for.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    restart: bool = False
    late: bool = False


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
        watched: Mapping[str, Callable[[], int | None]] | None = None,
    ) -> None:
        """Prepare; nothing starts yet.

        Args:
            specs: the children, in the order in which they start.
            stop_s: seconds that SIGTERM leaves them before they are killed.
            output: where their standard output and error go; None: where this process's go.
            watched: further processes, by name, with a call that answers the exit code once they have ended.
        """
        self._specs = specs
        self._stop_s = stop_s
        self._output = output
        self._watched = watched or {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._ready = asyncio.Event()

    def mark_ready(self) -> None:
        """From now on, the end of a restartable child is no reason to end. Those that are to start late start."""
        self._ready.set()

    async def run(self, work: Awaitable[None]) -> None:
        """Run the children until the work is done, then end them.

        Raises:
            InterruptedBySignalError: SIGINT or SIGTERM came first.
            ChildEndedError: a child ended first, and is not to be restarted.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        work_task = asyncio.ensure_future(work)
        tasks: set[asyncio.Future[None]] = {work_task, asyncio.create_task(self._interrupted())}
        try:
            for spec in self._specs:
                if not spec.late:
                    await self._start(spec)
                tasks.add(asyncio.create_task(self._start_late(spec) if spec.late else self._keep(spec)))
            for name, poll in self._watched.items():
                tasks.add(asyncio.create_task(_watch(name, poll)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Where the work and a child end at once, the child's end is the likely cause.
            for task in sorted(done, key=lambda task: task is work_task):
                task.result()
        finally:
            await _cancel(tasks)
            await self._stop()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _start(self, spec: Spec) -> None:
        self._processes[spec.name] = await asyncio.create_subprocess_exec(
            *leashed(spec.command),
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
            err.print(f"ropeway: {ChildEndedError(spec.name, code)}, starting it again in {delay:g} s", style="yellow")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)
            await self._start(spec)

    async def _interrupted(self) -> None:
        raise InterruptedBySignalError(await self._signals.get())

    async def _stop(self) -> None:
        """SIGTERM to all, then SIGKILL to those left after the time given, or after one more signal."""
        alive = [process for process in self._processes.values() if process.returncode is None]
        for process in alive:
            _send(process, signal.SIGTERM)
        if not alive:
            return
        ended: asyncio.Future[list[int]] = asyncio.gather(*(process.wait() for process in alive))
        impatient = asyncio.create_task(self._signals.get())
        waiting: set[asyncio.Future[Any]] = {ended, impatient}
        await asyncio.wait(waiting, timeout=self._stop_s, return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        for name, process in self._processes.items():
            if process.returncode is None:
                err.print(f"ropeway: {name} did not end in time, killing it", style="yellow")
                _send(process, signal.SIGKILL)
        await ended


async def _watch(name: str, poll: Callable[[], int | None]) -> None:
    # Polled: the process is not a child of the event loop.
    while (code := poll()) is None:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    raise ChildEndedError(name, code)


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _cancel(tasks: Iterable[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
