"""Builds a wheel with the native CPU kernels for the usual levels of CPUs: who installs it needs no compiler.

    python scripts/wheel.py [FOLDER]

The wheel goes to `dist/`, or to the folder given. It is for Linux on x86-64 and runs on the C library of the machine
that built it, and on newer ones; the C++ runtime is linked in. The checkout stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kernels.native_build import BASE_FLAGS, SOURCES, compile_library, compiler  # noqa: E402
from kernels.native_prebuilt import LEVELS, MANIFEST, digest_of, library_name, sources_digest  # noqa: E402

#: What a wheel is made of.
_ROOMS = ("ropeway", "gateway", "tasks", "worker", "engine", "kernels", "shared")
_FILES = ("pyproject.toml", "README.md", "LICENSE")
#: One library serves machines with other versions of the compiler's runtime.
_STATIC = ("-static-libstdc++", "-static-libgcc")


def libraries(folder: Path) -> None:
    """One for each level, and the manifest by which they are found."""
    folder.mkdir(parents=True)
    path, sources = compiler(), sources_digest(SOURCES)
    entries = {}
    for level in LEVELS:
        flags = (*BASE_FLAGS, *level.flags, *_STATIC)
        key = hashlib.sha256(f"{sources} {' '.join(flags)}".encode()).hexdigest()[:32]
        target = folder / library_name(level)
        compile_library(path, flags, key, target)
        target.chmod(0o755)
        entries[level.name] = {"key": key, "sha256": digest_of(target)}
        print(f"{target.name}: {target.stat().st_size // 1024} KiB")
    (folder / MANIFEST).write_text(json.dumps({"sources": sources, "libraries": entries}, indent=1), "utf-8")


def main(dist: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        tree.mkdir()
        for room in filter(lambda room: (ROOT / room).is_dir(), _ROOMS):
            shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
        for file in _FILES:
            shutil.copy2(ROOT / file, tree / file)
        libraries(tree / "kernels" / "prebuilt")
        (tree / "setup.cfg").write_text("[bdist_wheel]\nplat_name = linux_x86_64\n", "ascii")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(dist), str(tree)]
        subprocess.run(command, check=True)
    print(*sorted(path.name for path in dist.glob("ropeway-*.whl")))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "dist")
