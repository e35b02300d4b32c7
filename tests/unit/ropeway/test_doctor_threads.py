"""What `ropeway doctor` says of threads: how many compute, why, and on which CPUs."""

from __future__ import annotations

import pytest

from engine import cpus
from ropeway.doctor import _threads


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs."""
    usable(monkeypatch, 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def usable(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(cpus, "_affinity", lambda: list(range(count)))
    monkeypatch.setattr(cpus, "_quota", lambda: None)


def test_all_cpus_or_all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _threads(None, 2, "none") == "2 (all CPUs)"
    usable(monkeypatch, 16)
    assert _threads(None, 16, "none") == "15 (one CPU is left to gateway and Redis)"
    assert _threads(16, 16, "none") == "16 (the setting threads)"


def test_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _threads(5, 2, "none") == "2 (5 by the setting threads, and there are 2 CPUs)"
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert _threads(None, 64, "none") == "2 (64 by OMP_NUM_THREADS, and there are 2 CPUs)"


def test_pinned_threads() -> None:
    assert _threads(2, 2, "1,0") == "2 (the setting threads), pinned to CPUs 1, 0"
    assert "this process may not use CPU 7" in _threads(2, 2, "0,7")
