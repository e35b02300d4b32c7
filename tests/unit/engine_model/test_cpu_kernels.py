"""Which kernels an engine takes on a CPU, why, and with how many threads."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.cpu_kernels import choose
from engine.cpus import available_cpus
from engine.runner import ModelRunner
from kernels.cpu import native
from kernels.ops import is_native
from tests.support.native import load_native
from tests.support.tiny_llama import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no compiler."""

    def load(cache_dir: Path) -> None:
        raise native.NativeUnavailableError("no C++ compiler")

    monkeypatch.setattr(native, "load", load)


def takes_native(folder: Path, **options: Any) -> bool:
    engine = build_engine(EngineConfig(str(folder), num_blocks=4, cache_dir=folder / "cache", **options))
    return is_native(engine._runner._ops)  # type: ignore[attr-defined]


def test_auto_takes_them_where_they_are(folder: Path) -> None:
    load_native()
    assert takes_native(folder)
    assert takes_native(folder, cpu_kernels="native", dtype="float32")
    assert not takes_native(folder, cpu_kernels="torch")
    assert takes_native(folder, deterministic=True)


def test_auto_without_a_compiler_says_so_and_takes_torch(
    folder: Path, missing: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not takes_native(folder)
    assert [record.message for record in caplog.records] == ["CPU kernels of torch: no C++ compiler"]


def test_what_is_asked_for_and_cannot_be_is_an_error(folder: Path, missing: None) -> None:
    with pytest.raises(ValueError, match=r"cpu_kernels native: no C\+\+ compiler"):
        takes_native(folder, cpu_kernels="native")


def test_deterministic_mode_without_them_has_others_but_none_for_adapters(folder: Path, missing: None) -> None:
    assert not takes_native(folder, deterministic=True)
    with pytest.raises(ValueError, match="enable_lora: in deterministic mode"):
        takes_native(folder, deterministic=True, enable_lora=True)


def test_a_mistyped_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu_kernels must be one of auto, native, torch, not 'fast'"):
        EngineConfig("x", cpu_kernels="fast")  # type: ignore[arg-type]


def test_models_that_are_not_served() -> None:
    assert native.unserved(64, torch.bfloat16) is None
    assert native.unserved(64, torch.float16) == "float16 is not served by the native kernels"
    assert native.unserved(63, torch.float32) == "heads of 63 are not served by the native kernels"
    assert native.unserved(1024, torch.float32) == "heads of 1024 are not served by the native kernels"


def test_an_unserved_model_runs_on_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_native()
    monkeypatch.setattr(native, "unserved", lambda head_dim, dtype: f"heads of {head_dim} are not served")
    with caplog.at_level(logging.WARNING):
        assert not takes_native(folder)
    assert "CPU kernels of torch: heads of 8 are not served" in caplog.text


def test_the_choice_has_a_reason(missing: None) -> None:
    assert choose("torch").reason == "cpu_kernels is torch"
    assert choose("auto").reason == "no C++ compiler"


def test_an_engine_bounds_torch_s_threads_too(folder: Path) -> None:
    before = torch.get_num_threads()
    build_engine(EngineConfig(str(folder), num_blocks=4, threads=10_000, cpu_kernels="torch"))
    assert torch.get_num_threads() == available_cpus()
    torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "awake", "shares"), [(2, True, True), (1, True, False), (2, False, False)])
def test_several_threads_that_stay_awake_give_way(
    threads: int, awake: bool, shares: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if available_cpus() < threads:
        pytest.skip("there is one CPU")
    before = torch.get_num_threads()
    monkeypatch.setattr("engine.build.stays_awake", lambda: awake)
    try:
        engine = build_engine(EngineConfig(str(folder), num_blocks=4, threads=threads, cpu_kernels="torch"))
        assert isinstance(engine._runner, ModelRunner)
        assert (engine._runner._share is not None) == shares
    finally:
        torch.set_num_threads(before)


def test_threads_are_pinned_where_the_setting_says(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_native()
    pinned: list[list[int]] = []
    real = native.set_affinity

    def watched(cpus: list[int]) -> None:
        pinned.append(cpus)
        real(cpus)

    first = min(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "set_affinity", watched)
        takes_native(folder, threads=1, cpu_pinning=str(first))
        takes_native(folder, threads=1)
        with pytest.raises(ValueError, match="cpu_pinning: this process may not use CPU 1023"):
            takes_native(folder, threads=1, cpu_pinning="1023")
    assert pinned == [[first], []]
    with caplog.at_level(logging.WARNING):
        assert not takes_native(folder, cpu_kernels="torch", cpu_pinning="auto")
    assert "cpu_pinning is not used" in caplog.text


@pytest.mark.parametrize("value", ["fast", "", "3-1", "0-", "0-5000", "1,,2", "-1"])
def test_a_pinning_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="cpu_pinning must be none, auto or a list of CPUs"):
        EngineConfig("x", cpu_pinning=value)
