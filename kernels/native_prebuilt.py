"""Libraries that came with the package, for the usual levels of CPUs: no compiler is needed then.

`scripts/wheel.py` makes them. A checkout has none. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "prebuilt"
MANIFEST = "manifest.json"
_CPUINFO = Path("/proc/cpuinfo")

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of CPU.

    Attributes:
        name: of the level, in file names and messages.
        flags: of the compiler.
        needed: the CPU's flags, as Linux names them.
    """

    name: str
    flags: tuple[str, ...]
    needed: frozenset[str]


#: The best first.
LEVELS = (
    Level(
        "x86-64-v4-bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        _V4 | {"avx512_bf16", "avx512_vnni"},
    ),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
    Level("x86-64", ("-march=x86-64",), frozenset()),
)


def find(sources: Path) -> tuple[Path, str] | None:
    """The best library for this CPU that was made from these sources, and its key; None where there is none.

    What others than this user and root own or can write, or what has another hash than it was made with, is not taken.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not (FOLDER / MANIFEST).is_file():
        return None
    try:
        manifest = json.loads((FOLDER / MANIFEST).read_text("utf-8"))
        if not _safe(FOLDER / MANIFEST) or manifest["sources"] != sources_digest(sources):
            logger.warning("the libraries in %s are not of these sources", FOLDER)
            return None
        flags = cpu_flags()
        for level in LEVELS:
            entry = manifest["libraries"].get(level.name)
            if entry is not None and level.needed <= flags:
                path = FOLDER / library_name(level)
                if _safe(path) and digest_of(path) == entry["sha256"]:
                    return path, str(entry["key"])
                logger.warning("%s is not what was made", path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the libraries in %s cannot be used: %s", FOLDER, error)
    return None


def library_name(level: Level) -> str:
    """Of a level's file."""
    return f"libropeway-{level.name}.so"


def cpu_flags() -> frozenset[str]:
    """Of the first CPU."""
    for line in _CPUINFO.read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def sources_digest(folder: Path) -> str:
    """Over names and contents."""
    total = hashlib.sha256()
    for source in sorted(folder.iterdir()):
        total.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return total.hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _safe(path: Path) -> bool:
    status = path.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
