"""Finds the library in the package, or builds it with the system's compiler, once per source, compiler and CPU.

Imports no torch, so that the compiler can be at work while torch is being imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from kernels import native_prebuilt
from kernels.native_prebuilt import digest_of, sources_digest

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu" / "native" / "src"
#: For whatever CPU. GCC's own AVX-512 headers look uninitialised to it.
BASE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
#: For the CPU that compiles.
FLAGS = (*BASE_FLAGS, "-march=native")
COMPILERS = ("c++", "g++", "clang++")

_COMPILE_S = 300.0
_NAME = "libropeway.so"

_begun: dict[Path, Future[tuple[Path, str]]] = {}
_begun_lock = threading.Lock()


class NativeUnavailableError(Exception):
    """The native kernels cannot be used here; the message says why in one line."""


def compiler() -> str:
    """Path of the C++ compiler: `$CXX`, else the first of `COMPILERS`.

    Raises:
        NativeUnavailableError: there is none.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise NativeUnavailableError(f"no C++ compiler ({named or ', '.join(COMPILERS)})")


def begin(cache_dir: Path) -> None:
    """Start to build in a thread; `built` takes what comes of it."""
    with _begun_lock:
        if cache_dir in _begun:
            return
        future = _begun[cache_dir] = Future()

    def work() -> None:
        try:
            future.set_result(build(cache_dir))
        except BaseException as error:  # noqa: BLE001 - handed on to whoever asks
            future.set_exception(error)

    threading.Thread(target=work, name="native-build", daemon=True).start()


def built(cache_dir: Path) -> tuple[Path, str]:
    """As `build`, or what `begin` has begun."""
    with _begun_lock:
        future = _begun.pop(cache_dir, None)
    return build(cache_dir) if future is None else future.result()


def build(cache_dir: Path) -> tuple[Path, str]:
    """The library and its key: one that came with the package, else one in the cache, built if it is not there yet.

    A cache that cannot be written costs a build at each start, in a temporary folder which is left to the system.

    Raises:
        NativeUnavailableError: there is no compiler, or it fails.
    """
    if (shipped := native_prebuilt.find(SOURCES)) is not None:
        return shipped
    path = compiler()
    key = _key(path)
    folder = cache_dir / "kernels" / key
    if not intact(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(folder / "lock"):
                if not intact(folder):
                    _compile(path, key, folder)
        except OSError as error:
            logger.warning("the native kernels cannot be kept in %s (%s): they are built at each start", folder, error)
            folder = _build_aside(path, key)
    return folder / _NAME, key


def intact(folder: Path) -> bool:
    """Whether the folder's library is as this user wrote it: to load one that was cut off would end the process."""
    library = folder / _NAME
    try:
        status = library.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return False
        return digest_of(library) == (folder / "sha256").read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return False


def _build_aside(path: str, key: str) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="ropeway-kernels-"))
        _compile(path, key, folder)
    except OSError as error:
        raise NativeUnavailableError(f"no folder to build in: {error}") from error
    return folder


def _compile(path: str, key: str, folder: Path) -> None:
    """Build into the folder; both files come to their names by renames, the digest last."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        partial = Path(name) / _NAME
        compile_library(path, FLAGS, key, partial)
        partial.chmod(0o700)
        digest = Path(name) / "sha256"
        digest.write_text(digest_of(partial), "ascii")
        partial.replace(folder / _NAME)
        digest.replace(folder / "sha256")


def compile_library(path: str, flags: Sequence[str], key: str, target: Path) -> None:
    """Compile the sources into a library that answers with the key.

    Raises:
        NativeUnavailableError: the compiler at `path` fails.
    """
    command = [path, *flags, f'-DROPEWAY_KEY="{key}"', "-shared", "-o", str(target), str(SOURCES / "kernels.cpp")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"{path} did not end within {_COMPILE_S:g} s") from error
    if done.returncode != 0:
        logger.debug("%s", done.stderr)
        lines = done.stderr.strip().splitlines() or ["no message"]
        said = next((line for line in lines if "error:" in line), lines[-1])
        raise NativeUnavailableError(f"{path} failed with {done.returncode}: {said}")


def _key(path: str) -> str:
    """Of all that decides the library's code."""
    total = hashlib.sha256(sources_digest(SOURCES).encode())
    try:
        version = subprocess.run([path, "--version"], capture_output=True, timeout=30.0, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"{path} --version: {error}") from error
    total.update(version + b"\0" + " ".join(FLAGS).encode() + b"\0")
    total.update(f"{platform.machine()} {_cpu_flags()}".encode())
    return total.hexdigest()[:32]


def _cpu_flags() -> str:
    """What tells CPUs apart for `-march=native`: model and instructions of the first."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "features", "cpu part")
    try:
        first = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].strip().lower() in wanted)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
