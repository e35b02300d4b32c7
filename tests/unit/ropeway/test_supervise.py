"""Children that start and end together: small real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest

from ropeway import supervise
from ropeway.supervise import ChildEndedError, InterruptedBySignalError, Spec, Supervisor
from tests.unit.ropeway.test_embedded import ended

ENV = dict(os.environ)


class Folder:
    """Where children leave word of themselves."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def child(self, name: str, then: str, *, restart: bool = False, late: bool = False) -> Spec:
        """A child that appends its pid to a file of its name, then runs `then`."""
        code = (
            "import os, signal, sys, time\n"
            f"with open({str(self.path / name)!r}, 'a') as f: f.write(f'{{os.getpid()}}\\n')\n{then}"
        )
        return Spec(name, [sys.executable, "-I", "-S", "-c", code], ENV, restart=restart, late=late)

    def pids(self, name: str) -> list[int]:
        file = self.path / name
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    async def seen(self, name: str, times: int = 1) -> int:
        while len(self.pids(name)) < times:
            await asyncio.sleep(0.01)
        return self.pids(name)[-1]


SLEEP = "time.sleep(600)"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


async def forever() -> None:
    await asyncio.Event().wait()


async def test_children_end_when_the_work_is_done(folder: Folder) -> None:
    async def work() -> None:
        await folder.seen("a")
        await folder.seen("b")

    await Supervisor([folder.child("a", SLEEP), folder.child("b", SLEEP)], stop_s=20).run(work())
    assert all(ended(pid) for pid in folder.pids("a") + folder.pids("b"))


async def test_a_late_child_starts_once_the_whole_is_ready(folder: Folder) -> None:
    supervisor = Supervisor(
        [folder.child("late", SLEEP, late=True), folder.child("a", SLEEP), folder.child("b", SLEEP)], stop_s=20
    )

    async def work() -> None:
        await folder.seen("a")
        await folder.seen("b")
        assert folder.pids("late") == []
        supervisor.mark_ready()
        await folder.seen("late")

    await supervisor.run(work())
    assert ended(folder.pids("late")[0])


async def test_a_late_child_that_ends_for_good_ends_the_others(folder: Folder) -> None:
    supervisor = Supervisor([folder.child("late", "sys.exit(7)", late=True), folder.child("a", SLEEP)], stop_s=20)

    async def work() -> None:
        await folder.seen("a")
        supervisor.mark_ready()
        await forever()

    with pytest.raises(ChildEndedError, match="late ended with code 7"):
        await supervisor.run(work())
    assert ended(folder.pids("a")[0])


async def test_an_error_of_the_work_ends_the_children_and_is_raised(folder: Folder) -> None:
    async def work() -> None:
        await folder.seen("a")
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await Supervisor([folder.child("a", SLEEP)], stop_s=20).run(work())
    assert ended(folder.pids("a")[0])


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("sys.exit(7)", 7, "dying ended with code 7"),
        ("sys.exit(0)", 1, "dying ended with code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "dying ended by SIGKILL"),
    ],
)
async def test_a_child_that_ends_takes_the_others_with_it(folder: Folder, then: str, code: int, said: str) -> None:
    specs = [folder.child("other", SLEEP), folder.child("dying", then)]
    with pytest.raises(ChildEndedError, match=said) as caught:
        await Supervisor(specs, stop_s=20).run(forever())
    assert caught.value.exit_code == code
    assert all(ended(pid) for pid in folder.pids("other"))


async def test_a_restartable_child_is_started_again_once_all_was_ready(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "_FIRST_DELAY_S", 0.0)
    supervisor = Supervisor([folder.child("worker", SLEEP, restart=True)], stop_s=20)

    async def work() -> None:
        pid = await folder.seen("worker")
        supervisor.mark_ready()
        os.kill(pid, signal.SIGKILL)
        await folder.seen("worker", 2)

    await supervisor.run(work())
    assert len(folder.pids("worker")) == 2 and all(ended(pid) for pid in folder.pids("worker"))


@pytest.mark.parametrize(("ready", "code"), [(False, 1), (True, 2), (True, os.EX_CONFIG)])
async def test_it_is_not_where_a_restart_makes_no_sense(folder: Folder, ready: bool, code: int) -> None:
    """Before all was ready, or with wrong settings."""
    supervisor = Supervisor([folder.child("worker", f"sys.exit({code})", restart=True)], stop_s=20)
    if ready:
        supervisor.mark_ready()
    with pytest.raises(ChildEndedError, match=f"worker ended with code {code}"):
        await supervisor.run(forever())
    assert len(folder.pids("worker")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_all(folder: Folder, number: signal.Signals) -> None:
    async def work() -> None:
        await folder.seen("a")
        os.kill(os.getpid(), number)
        await forever()

    with pytest.raises(InterruptedBySignalError, match=number.name):
        await Supervisor([folder.child("a", SLEEP)], stop_s=20).run(work())
    assert ended(folder.pids("a")[0])


async def test_a_child_that_ignores_the_signal_is_killed_after_its_time(folder: Folder) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('set', flush=True)\n" + SLEEP
    output = folder.path / "output"

    async def work() -> None:
        while "set" not in output.read_text():
            await asyncio.sleep(0.01)

    with output.open("wb") as file:
        await Supervisor([folder.child("a", stubborn)], stop_s=0.05, output=file).run(work())
    assert ended(folder.pids("a")[0])


async def test_a_second_signal_kills_at_once(folder: Folder) -> None:
    # The child answers SIGTERM by sending the supervisor a second signal, and stays.
    impatient = (
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))\nprint('set', flush=True)\n"
        "while True: time.sleep(600)"
    )
    output = folder.path / "output"

    async def work() -> None:
        while "set" not in output.read_text():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await forever()

    with output.open("wb") as file, pytest.raises(InterruptedBySignalError):
        await Supervisor([folder.child("a", impatient)], stop_s=600, output=file).run(work())
    assert ended(folder.pids("a")[0])


class Server:
    """A server that lives for a few looks at a time."""

    def __init__(self, *, restartable: bool, restarts: int = 0) -> None:
        self.restartable, self._looks, self._restarts = restartable, 0, restarts
        self.restarted = 0

    def poll(self) -> int | None:
        self._looks += 1
        return None if self._looks < 3 else -11

    async def restart(self) -> None:
        if self.restarted == self._restarts:
            raise RuntimeError("it is broken")
        self.restarted += 1
        self._looks = 0


@pytest.mark.parametrize(("restartable", "ready"), [(False, True), (True, False)])
async def test_a_server_counts_as_a_child(folder: Folder, restartable: bool, ready: bool) -> None:
    watched = {"Redis": Server(restartable=restartable, restarts=5)}
    supervisor = Supervisor([folder.child("a", SLEEP)], stop_s=20, watched=watched)
    if ready:
        supervisor.mark_ready()
    with pytest.raises(ChildEndedError, match="Redis ended by SIGSEGV") as caught:
        await supervisor.run(forever())
    assert caught.value.exit_code == 139
    assert all(ended(pid) for pid in folder.pids("a")) and not watched["Redis"].restarted


async def test_a_server_whose_data_outlive_it_is_started_again(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_FIRST_DELAY_S", 0.01)
    server = Server(restartable=True, restarts=2)
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    supervisor = Supervisor([folder.child("a", stubborn)], stop_s=600, watched={"Redis": server})
    supervisor.mark_ready()
    # Its children could not end in order without it: they do not get the time for that.
    with pytest.raises(RuntimeError, match="it is broken"):
        await supervisor.run(forever())
    assert server.restarted == 2
    said = capsys.readouterr().err
    assert "Redis ended by SIGSEGV, starting it again\n" in said and "starting it again in 0.01 s\n" in said
    assert all(ended(pid) for pid in folder.pids("a"))


class Companion:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str | int] = []

    def starts(self) -> list[str]:
        self.heard.append("start")
        return [str(len(self.heard))]

    async def ended(self, code: int) -> None:
        self.heard.append(code)


async def test_a_companion_hears_of_each_start_and_end(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_FIRST_DELAY_S", 0.05)
    companion = Companion()
    # The argument of its start is the child's exit code; the second one stays, and does not end when it is told to.
    stubborn = (
        "if sys.argv[1] == '1': sys.exit(int(sys.argv[1]))\n"
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({str(folder.path / 'set')!r}, 'w').close()\n{SLEEP}"
    )
    child = dataclasses.replace(folder.child("worker", stubborn, restart=True), companion=companion)
    supervisor = Supervisor([child], stop_s=0.05)
    supervisor.mark_ready()

    async def work() -> None:
        while not (folder.path / "set").exists():
            await asyncio.sleep(0.01)

    await supervisor.run(work())
    assert companion.heard == ["start", 1, "start", 0]


async def test_a_companion_has_nothing_to_say_of_a_child_that_ended_in_order(folder: Folder) -> None:
    companion = Companion()
    child = dataclasses.replace(
        folder.child(
            "worker",
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
            f"open({str(folder.path / 'set')!r}, 'w').close()\n{SLEEP}",
        ),
        companion=companion,
    )

    async def work() -> None:
        while not (folder.path / "set").exists():
            await asyncio.sleep(0.01)

    await Supervisor([child], stop_s=20).run(work())
    assert companion.heard == ["start"]


async def test_children_are_in_sessions_of_their_own(folder: Folder) -> None:
    """So that Ctrl-C reaches them only through the supervisor."""

    async def work() -> None:
        pid = await folder.seen("a")
        assert os.getsid(pid) == pid != os.getsid(0)

    await Supervisor([folder.child("a", SLEEP)], stop_s=20).run(work())


def test_a_worker_that_does_not_fit_to_kept_jobs_comes_with_the_next_step() -> None:
    from ropeway.serve import _hint

    refused = ChildEndedError("worker", 78)
    assert "/jobs" in _hint(refused, Path("/jobs")) and "--data-dir" in _hint(refused, Path("/jobs"))
    assert _hint(refused, None) == "" and _hint(ChildEndedError("worker", 1), Path("/jobs")) == ""
