"""The setting `kernels`: which operations an engine gets, and what it says where it cannot have them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from kernels import ops
from kernels.backends import prepare_triton
from kernels.errors import KernelsUnavailableError
from kernels.ops import is_triton, ops_for, wants_groups
from shared.settings import WorkerSettings
from tests.support.tiny_llama import save_tiny_model
from worker.engines import build_engine as build_worker_engine

#: What there are kernels for.
KERNELS = {
    "apply_penalties", "draw", "draw_packed", "draw_rows", "embed", "embed_delta", "gated_linear", "gelu_and_mul",
    "lora_delta", "paged_attention", "rms_norm", "rotary", "silu_and_mul", "uniforms", "uniforms_packed", "write_kv",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("triton") / "tiny"
    save_tiny_model(path)
    return path


def taken(folder: Path, **options: Any) -> ops.Ops:
    engine = build_engine(EngineConfig(str(folder), device="cpu", num_blocks=4, cache_dir=folder / "cache", **options))
    return engine._runner._ops  # type: ignore[attr-defined,no-any-return]


def test_triton_has_its_own_of_all_that_it_should() -> None:
    chosen, plain = ops_for("cpu", kernels="triton"), ops_for("cpu", kernels="reference")
    own = {name for name in ops.Ops.__slots__ if getattr(chosen, name) is not getattr(plain, name)}
    assert own == KERNELS
    assert is_triton(chosen)
    assert not wants_groups(chosen)
    assert wants_groups(plain)
    assert not is_triton(plain)


def test_deterministic_mode_prefers_what_is_invariant() -> None:
    chosen = ops_for("cpu", kernels="triton", deterministic=True)
    assert chosen.paged_attention is ops_for("cpu", deterministic=True).paged_attention
    assert chosen.embed is ops_for("cpu", kernels="triton").embed


def test_an_engine_takes_what_is_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert is_triton(taken(folder, kernels="triton"))
    assert "Triton's kernels run in its interpreter on a CPU: for tests, not for work" in caplog.text
    assert taken(folder, kernels="reference") == ops_for("cpu", kernels="reference")


def test_a_worker_passes_its_setting_on(folder: Path) -> None:
    settings = WorkerSettings(
        model=str(folder), device="cpu", kernels="triton", num_blocks=4, cache_dir=folder / "cache", max_model_len=64
    )  # type: ignore[call-arg]
    assert is_triton(build_worker_engine(settings)._runner._ops)  # type: ignore[attr-defined]


def test_a_process_sets_the_interpreter_by_itself() -> None:
    code = (
        "import torch; from kernels.ops import ops_for\n"
        "ops = ops_for('cpu', kernels='triton')\n"
        "print(ops.embed(torch.eye(3), torch.tensor([2, 0])).tolist())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]"


def test_a_model_that_is_not_served_is_refused_at_load(folder: Path) -> None:
    with pytest.raises(ValueError, match="kernels triton: blocks of 4 tokens; served are 16 and 32"):
        taken(folder, kernels="triton", block_size=4)


def test_where_the_device_decides_references_stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.cpu_kernels.use_native", lambda *_: False)
    monkeypatch.setitem(ops.BACKENDS, "cpu", ("triton", "reference"))  # as on CUDA
    ops._of_device.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not is_triton(taken(folder, block_size=4))
    assert "kernels of plain torch, not of Triton: blocks of 4 tokens" in caplog.text
    ops._of_device.cache_clear()


def test_without_triton_it_is_refused_or_done_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kernels.backends.has_triton", lambda: False)
    monkeypatch.setattr("kernels.ops.has_triton", lambda: False)
    ops._of_device.cache_clear()
    with pytest.raises(ValueError, match=r"kernels triton: the package triton is not installed"):
        taken(folder, kernels="triton")
    with caplog.at_level(logging.WARNING):
        found = [ops_for("cuda") for _ in range(2)]
    assert found[0] == ops_for("cpu", kernels="reference")
    assert [record.message for record in caplog.records] == [
        "no Triton on this cuda device: it computes by the references, in plain torch"
    ]
    ops._of_device.cache_clear()


def test_one_process_interprets_or_compiles_but_not_both() -> None:
    with pytest.raises(KernelsUnavailableError, match="Triton interpreting on a CPU: start another one without"):
        prepare_triton("cuda")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="kernels must be one of auto, triton, reference, not 'cuda'"):
        EngineConfig("x", kernels="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cpu_kernels native is for kernels auto, not for kernels triton"):
        EngineConfig("x", kernels="triton", cpu_kernels="native")
    with pytest.raises(ValueError, match="kernels must be one of"):
        ops_for("cpu", kernels="fast")  # type: ignore[arg-type]
