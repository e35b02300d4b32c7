"""Ahead-of-time compilation: every kernel builds, and keeps within its target's bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kernels.triton.resources import Resources, table


def compiled(folder: Path, *arguments: str) -> list[Resources]:
    """In a process that compiles: this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.triton.resources", "--json", str(folder / "found.json"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [Resources(**each) for each in json.loads((folder / "found.json").read_text("utf-8"))["found"]]


def test_the_most_important_for_hopper(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--quick", "--target", "sm_90")
    names = {each.name for each in found}
    assert {"decode heads of 128", "prefill heads of 128", "draw", "lora shrink rank 16", "write_kv float8"} <= names
    assert all(each.spills == 0 and 0 < each.registers <= 255 for each in found)


def test_what_is_over_a_bound_is_a_problem() -> None:
    fine = Resources("sm_90", "decode heads of 128", 200, 232_448, 0)
    assert fine.problem is None
    spilling = Resources("sm_90", "decode heads of 128", 255, 0, 4)
    assert spilling.problem == "4 bytes spilled, the bound is 0"
    large = Resources("gfx942", "decode heads of 128", 100, 65_537, 0)
    assert large.problem == "65537 bytes of shared memory, gfx942 has 65536"
    text = table([fine, large], {"a": "b"})
    assert "200 / 227.0 / 0" in text
    assert text.endswith("a: b")
