"""`benchmarks.gpu_check` goes all its ways, tiny, in Triton's interpreter; it sees a kernel that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.measure import close
from kernels import ops


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    file = folder / "gpu.json"
    code = gpu_check.main([*arguments, "--json", str(file)])
    return code, json.loads(file.read_text("utf-8"))["rows"]


def sections(*names: str) -> list[str]:
    return ["--device", "cpu", "--tiny", *[part for name in names for part in ("--only", name)]]


def test_kernels_and_passes(tmp_path: Path) -> None:
    code, rows = run(tmp_path, *sections("elementwise", "1b"))
    assert code == 0, rows
    found = {row["name"]: row["figures"] for row in rows}
    assert {"us", "gb_s", "share"} <= found["rms_norm 3 x 96"].keys()
    assert {"us", "tokens_s", "share"} <= found["1b eager: decode 2 x 18"].keys()
    assert "1b eager, 4 adapters: prefill 20" in found
    assert {"1b graph: decode 1 x 18", "1b graph, 4 adapters: decode 2 x 18"} <= found.keys()
    for label in ("engine", "engine ahead", "engine, 4 adapters", "engine ahead, 4 adapters"):
        assert found[f"1b {label}: decode 2"]["tokens_s"] > 0


@pytest.mark.kernels
def test_all_sections(tmp_path: Path) -> None:
    code, rows = run(tmp_path, *sections())
    assert code == 0, rows
    assert {row["section"] for row in rows} >= {*gpu_check.KERNELS, "engine 1b", "engine 8b"}


def test_a_wrong_kernel_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.ops_for("cpu", kernels="triton").rms_norm
    monkeypatch.setitem(ops._table, ("rms_norm", "triton"), lambda *arguments: right(*arguments) * 1.02)
    code, rows = run(tmp_path, *sections("elementwise"))
    assert code == 1
    wrong = {row["name"].split()[0] for row in rows if row["problem"] is not None}
    assert wrong == {"rms_norm"}
    assert all("numbers are off" in row["problem"] for row in rows if row["problem"] is not None)


@pytest.mark.kernels
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, rows = run(tmp_path, "--only", "attention")
    assert code == 1
    assert [row["problem"] for row in rows] == ["torch finds no CUDA device"]
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu"])


def test_a_section_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.sys, "executable", "/bin/false")
    code, rows = run(tmp_path, "--only", "attention")
    assert code == 1
    assert rows[0]["problem"] == "ended with 1: nothing on standard error"


def test_what_counts_as_close() -> None:
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    close(expected.float(), expected, 1e-6, 0.0)
    for wrong in (torch.tensor([1.0, 2.1]), torch.tensor([1.0, float("nan")]), torch.tensor([1.0])):
        with pytest.raises(AssertionError):
            close(wrong, expected, 1e-2, 1e-2)
