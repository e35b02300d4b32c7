"""How many threads compute, and on which CPUs: by affinity, quota, neighbours and cores."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine import cpus
from engine.cpus import available_cpus, bounded_threads, check_pinning, pinned_cpus, serving_threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight CPUs, of which 0 and 4 are one core, 1 and 5 the next, and so on; no quota."""
    for cpu in range(8):
        (tmp_path / f"cpu{cpu}").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cpus, "_SIBLINGS", str(tmp_path / "cpu{}"))
    monkeypatch.setattr(cpus, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("nonsense", 8), (None, 8)],
)
def test_cpus_by_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, count: int) -> None:
    monkeypatch.setattr(cpus, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: set(range(8)))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert available_cpus() == count


def test_more_threads_than_cpus_are_not_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpus, "available_cpus", lambda: 2)
    with caplog.at_level(logging.WARNING):
        assert bounded_threads(1) == 1
        assert bounded_threads(2) == 2
        assert caplog.records == []
        assert bounded_threads(64) == 2
    assert "64 threads are asked for, and this process may use 2 CPUs: 2 are used" in caplog.text


def test_a_worker_leaves_a_cpu_to_others_where_there_are_many(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving_threads() == 7
    (machine / "cpu.max").write_text("700000 100000\n")
    assert serving_threads() is None
    (machine / "cpu.max").unlink()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert serving_threads() is None


def test_pinning_takes_each_core_before_any_twice(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned_cpus("none", 3) == []
    assert pinned_cpus("auto", 3) == [0, 1, 2]
    assert pinned_cpus("auto", 6) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: {1, 2, 5, 6, 7})
    assert pinned_cpus("auto", 5) == [1, 2, 7, 5, 6]
    for path in machine.glob("cpu?"):
        path.unlink()
    assert pinned_cpus("auto", 5) == [1, 2, 5, 6, 7]


def test_pinning_by_a_list(machine: Path) -> None:
    assert pinned_cpus("6-7,0, 2", 4) == [6, 7, 0, 2]
    assert pinned_cpus("6-7,0", 2) == [6, 7]
    with pytest.raises(ValueError, match="cpu_pinning: 3 CPUs for 4 threads; name more, or set threads"):
        pinned_cpus("6-7,0", 4)
    with pytest.raises(ValueError, match="cpu_pinning: this process may not use CPU 8, only 0,1,2,3,4,5,6,7"):
        pinned_cpus("7-9", 2)
    with pytest.raises(ValueError, match="cpu_pinning: '1,0-2' names a CPU twice"):
        check_pinning("1,0-2")
