"""Libraries that came with the package: the best for the CPU is taken, and none that is not what was made."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kernels import native_build, native_prebuilt
from kernels.cpu.native.library import open_library
from kernels.native_build import NativeUnavailableError, build, compiler
from kernels.native_prebuilt import LEVELS, MANIFEST, cpu_flags, find, library_name

SMALL = 'extern "C" { long ropeway_abi() { return 1; } const char* ropeway_key() { return ROPEWAY_KEY; } }\n'
BEST, MIDDLE, PLAIN = (level.name for level in LEVELS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries of a small source, made as for a wheel."""
    try:
        compiler()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    if native_prebuilt.platform.machine() != "x86_64":
        pytest.skip("libraries are made for x86-64")
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "kernels.cpp").write_text(SMALL)
    monkeypatch.setattr(native_build, "SOURCES", sources)
    path = Path(__file__).parents[2] / "scripts" / "wheel.py"
    spec = importlib.util.spec_from_file_location("wheel_script", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = tmp_path / "prebuilt"
    script.libraries(made)
    monkeypatch.setattr(native_prebuilt, "FOLDER", made)
    return made


def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> str | None:
    """Name of the level that a CPU with these flags gets."""
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(native_prebuilt, "_CPUINFO", tmp_path / "cpuinfo")
    found = find(native_build.SOURCES)
    return None if found is None else found[0].stem.removeprefix("libropeway-")


def needed(level: str) -> str:
    return " ".join(next(each for each in LEVELS if each.name == level).needed)


def test_the_best_for_the_cpu_is_taken(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(monkeypatch, tmp_path, f"fpu {needed(BEST)} amx_tile") == BEST
    assert on(monkeypatch, tmp_path, needed(BEST).replace("avx512_bf16", "")) == MIDDLE
    assert on(monkeypatch, tmp_path, needed(MIDDLE)) == MIDDLE
    assert on(monkeypatch, tmp_path, needed(MIDDLE).replace("fma", "")) == PLAIN
    assert on(monkeypatch, tmp_path, "fpu") == PLAIN


def test_it_needs_no_compiler_and_no_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    path, key = build(tmp_path / "cache")
    assert path.parent == folder
    assert not (tmp_path / "cache").exists()
    assert key == json.loads((folder / MANIFEST).read_text())["libraries"][path.stem.removeprefix("libropeway-")]["key"]
    with pytest.raises(NativeUnavailableError, match="ropeway_"):  # the small one has no kernels, but it can be opened
        open_library(path, key)


@pytest.mark.parametrize("harm", ["cut", "writable by others", "manifest", "other sources", "gone"])
def test_what_is_not_what_was_made_is_not_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    for level in LEVELS:
        path = folder / library_name(level)
        if harm == "cut":
            path.write_bytes(path.read_bytes()[:-8])
        elif harm == "writable by others":
            path.chmod(0o777)
        elif harm == "gone":
            path.unlink()
    if harm == "manifest":
        (folder / MANIFEST).write_text("[]")
    elif harm == "other sources":
        (native_build.SOURCES / "kernels.cpp").write_text(SMALL + "\n")
    assert on(monkeypatch, tmp_path, needed(BEST)) is None
    assert str(folder) in caplog.text


def test_a_checkout_has_none_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_prebuilt, "FOLDER", tmp_path)
    assert find(native_build.SOURCES) is None
    assert caplog.records == []


def test_this_cpu_has_flags() -> None:
    if native_prebuilt.platform.machine() == "x86_64":
        assert "sse2" in cpu_flags()
