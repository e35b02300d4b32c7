"""The native sources under the compiler's sanitizers: odd shapes, empty batches, block boundaries, unwritten slots."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernels.native_build import FLAGS, SOURCES, NativeUnavailableError, compiler

#: Set after the build's own, so that these win.
CHECKED = ("-O1", "-g", "-fno-sanitize-recover=undefined")


def build(folder: Path, *flags: str) -> Path:
    """The sources' own test as a program; skips where a compiler or its sanitizers are missing."""
    try:
        cxx = compiler()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    empty, checked = folder / "empty", folder / "selftest"
    if subprocess.run([cxx, *flags, "-o", empty, folder / "empty.cpp"], capture_output=True, check=False).returncode:
        pytest.skip(f"{cxx} does not build with {' '.join(flags)}")
    if subprocess.run([empty], capture_output=True, check=False).returncode:
        pytest.skip(f"a program built with {' '.join(flags)} does not run here")
    subprocess.run([cxx, *FLAGS, *flags, "-o", checked, SOURCES / "selftest.cpp"], check=True)
    return checked


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["native", "x86-64-v3"])
def test_addresses_and_undefined_behaviour(tmp_path: Path, cpu: str) -> None:
    program = build(tmp_path, *CHECKED, f"-march={cpu}", "-fsanitize=address,undefined")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_data_races(tmp_path: Path) -> None:
    program = build(tmp_path, *CHECKED, "-fsanitize=thread")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
