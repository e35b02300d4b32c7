"""What starts before torch is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import startup
from engine.config import EngineConfig
from engine.startup import start_engine, wants_native
from kernels import native_build
from tests.support.tiny_llama import save_tiny_model


def test_the_front_of_the_engine_imports_no_torch() -> None:
    code = "import sys, engine.llm, worker.engines; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "driver", "wanted"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"device": "cpu"}, True, True),
        ({"device": "cuda"}, False, False),
        ({"cpu_kernels": "torch"}, False, False),
        ({"cpu_kernels": "native"}, False, True),
    ],
)
def test_the_compiler_is_started_where_its_work_will_be_used(
    settings: dict[str, Any], driver: bool, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver:
        (tmp_path / "version").touch()
    monkeypatch.setattr(startup, "_NVIDIA", tmp_path / "version")
    assert wants_native(EngineConfig("x", **settings)) is wanted


def test_it_is_started_before_the_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "tiny")
    begun: list[Path] = []
    monkeypatch.setattr(native_build, "begin", begun.append)
    cache = tmp_path / "cache"
    start_engine(EngineConfig(str(tmp_path / "tiny"), num_blocks=4, device="cpu", cpu_kernels="torch", cache_dir=cache))
    assert begun == []
    with pytest.raises(ValueError, match="no such folder"):
        start_engine(EngineConfig("./nothing", device="cpu", cache_dir=cache))
    assert set(begun) == {cache}
