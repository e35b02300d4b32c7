"""Signs of life of a task's process, and when its parent takes it for hung."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from rq import Worker

from shared.settings import TasksSettings
from tasks import horse, horse_main
from tasks.horse import Horse, Order, settings_of
from tasks.rq_worker import TaskWorker


async def test_signs_come_from_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        monkeypatch.setattr(horse_main, "_channel", theirs)
        monkeypatch.setattr(horse_main, "_SIGN_S", 0.0)
        async with horse_main.living():
            for _ in range(5):
                await asyncio.sleep(0)
        assert ours.recv(100).startswith(b"...")
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            ours.recv(100)


def test_signs_that_nobody_reads_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        monkeypatch.setattr(horse_main, "_channel", theirs)
        while True:
            try:
                theirs.send(b"." * 4096)
            except BlockingIOError:
                break
        horse_main._sign()
        ours.close()
        horse_main._sign()


def test_the_parent_sees_signs_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horse, "_PROGRAM", "import os; os.write(0, b'..'); os.read(0, 9999); os.read(0, 1)")
    order = Order(settings_of(TasksSettings()), "w", "j", "e", "WARNING")
    process = Horse(order)
    try:
        assert os.getpgid(process.pid) == process.pid, "a group of its own, which can be killed as one"
        process._channel.setblocking(True)
        process._channel.settimeout(60)
        assert process._channel.recv(1)
        process._channel.setblocking(False)
        assert process.gave_sign() and not process.gave_sign()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
    assert not process.gave_sign()
    process.close()


def test_the_order_holds_nothing_that_signs_webhooks() -> None:
    settings = TasksSettings(webhook_secrets=["whsec_" + "A" * 32], adapter_roots=["/a"])
    assert "webhook_secrets" not in settings_of(settings)
    assert TasksSettings(**settings_of(settings)).adapter_roots == settings.adapter_roots


def test_only_silence_in_many_looks_together_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "maintain_heartbeats", lambda *_: None)
    worker: Any = object.__new__(TaskWorker)
    signs: list[bool] = []
    killed: list[str] = []
    worker._horse = SimpleNamespace(gave_sign=lambda: signs.pop(0))
    worker._horse_pid, worker.job_monitoring_interval = 1, 10
    worker.connection = SimpleNamespace(expire=lambda *_: None)
    worker.kill_horse, worker.on_hung = lambda: killed.append("process"), lambda: killed.append("counted")
    signs += [False] * 5 + [True] + [False] * 6
    for left in range(11, 0, -1):
        worker.maintain_heartbeats(SimpleNamespace(id="j"), None)
        assert len(signs) == left and not killed
    worker.maintain_heartbeats(SimpleNamespace(id="j"), None)
    assert killed == ["counted", "process"]
