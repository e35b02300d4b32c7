"""Building and loading the native library where something is amiss: nothing is loaded that is not what it should be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native_build as building
from kernels.cpu.native import library
from kernels.cpu.native.library import load, open_library
from kernels.native_build import NativeUnavailableError, build, compiler, intact
from tests.support.native import load_native

SMALL = 'extern "C" { long ropeway_abi() { return 1; } const char* ropeway_key() { return ROPEWAY_KEY; } }\n'


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles in no time, in place of the real one; gives the cache folder."""
    try:
        compiler()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "kernels.cpp").write_text(SMALL)
    monkeypatch.setattr(building, "SOURCES", sources)
    return tmp_path / "cache"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been loaded in this process yet."""
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_reason", None)


def mock_compiler(folder: Path, body: str) -> str:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_second_build_takes_what_the_first_has_made(small: Path) -> None:
    path, key = build(small)
    stamp = path.stat().st_mtime_ns
    assert intact(path.parent)
    assert build(small) == (path, key)
    assert path.stat().st_mtime_ns == stamp
    assert sorted(each.name for each in path.parent.iterdir()) == ["libropeway.so", "lock", "sha256"]


def test_what_was_begun_is_taken_up(small: Path) -> None:
    building.begin(small)
    building.begin(small)
    path, key = building.built(small)
    assert intact(path.parent)
    assert building.built(small) == (path, key)


def test_what_goes_wrong_in_what_was_begun_is_told(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    building.begin(small)
    with pytest.raises(NativeUnavailableError, match="no-such-compiler"):
        building.built(small)


def test_other_sources_and_other_cpus_have_other_keys(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build(small)[1]}
    (building.SOURCES / "kernels.cpp").write_text(SMALL + "\n")
    keys.add(build(small)[1])
    monkeypatch.setattr(building, "_cpu_flags", lambda: "flags : fpu")
    keys.add(build(small)[1])
    assert len(keys) == 3


@pytest.mark.parametrize("harm", ["cut", "other bytes", "no digest", "writable by others"])
def test_a_harmed_library_is_built_again(small: Path, harm: str) -> None:
    path, _ = build(small)
    whole = path.read_bytes()
    if harm == "cut":
        path.write_bytes(whole[:1000])
    elif harm == "other bytes":
        path.write_bytes(whole[:-8] + b"x" * 8)
    elif harm == "no digest":
        (path.parent / "sha256").unlink()
    else:
        path.chmod(0o777)
    assert not intact(path.parent)
    again, _ = build(small)
    assert again == path
    assert intact(path.parent)


def test_a_cache_that_cannot_be_written_costs_a_build(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    small.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        path, key = build(small)
    assert "cannot be kept" in caplog.text
    assert path.is_file()
    assert small.is_file()
    assert len(key) == 32


def test_processes_that_build_at_once_build_once(small: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    cxx = mock_compiler(tmp_path, f'case "$1" in --version) ;; *) echo built >> {log} ;; esac; exec g++ "$@"')
    code = (
        "import sys; from pathlib import Path; from kernels import native_build as build\n"
        "build.SOURCES = Path(sys.argv[1]); print(build.build(Path(sys.argv[2]))[0])"
    )
    command = [sys.executable, "-c", code, str(building.SOURCES), str(small)]
    each = [
        subprocess.Popen(command, env={**os.environ, "CXX": cxx}, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    paths = {process.communicate()[0] for process in each}
    assert [process.returncode for process in each] == [0, 0, 0]
    assert len(paths) == 1
    assert log.read_text().split() == ["built"]


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
            load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_named_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        compiler()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('[ "$1" = --version ] && echo 1 && exit 0; echo "first\nlast line" >&2; exit 3', "failed with 3: last line"),
        ("exit 1", "--version"),
    ],
)
def test_a_compiler_that_fails(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setenv("CXX", mock_compiler(tmp_path, body))
    with pytest.raises(NativeUnavailableError, match=message):
        build(small)


def test_a_library_that_lacks_functions_is_refused(small: Path) -> None:
    path, _ = build(small)
    with pytest.raises(NativeUnavailableError, match="ropeway_"):
        open_library(path, "0" * 32)


def test_the_library_of_another_key_is_refused() -> None:
    load_native()
    assert library._loaded is not None
    with pytest.raises(NativeUnavailableError, match="is another library"):
        open_library(Path(library._loaded._name), "0" * 32)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("text")
    with pytest.raises(NativeUnavailableError, match=r"x\.so"):
        open_library(tmp_path / "x.so", "")


def test_no_second_openmp_runtime_comes_with_the_library() -> None:
    load_native()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.rpartition("/")[2]}
    assert len({path for path in loaded if "gomp" in path or "iomp" in path or "libomp" in path}) == 1
