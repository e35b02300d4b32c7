"""The code of other versions of this project: an earlier commit, and ones that nobody has written."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.support.stack import ROOT

ROOMS = ("ropeway", "gateway", "tasks", "worker", "engine", "kernels", "shared")
#: In every message of the next minor version. Not its default, so that it is always sent.
_NEW_FIELD = '    next_minor: dict[str, object] = msgspec.field(default_factory=lambda: {"deep": [1, {"er": None}]})\n'
_MESSAGES = (
    "Envelope",
    "Head",
    "ChoiceFrame",
    "Frame",
    "ChoiceResult",
    "Result",
    "Card",
    "TokenizerBundle",
    "WorkerInfo",
)


def previous(folder: Path) -> str:
    """Write an earlier commit's rooms into a folder: `ROPEWAY_UPGRADE_FROM`, else the one before this.

    Skips the test where the history has no such commit, as in a shallow clone.

    Returns:
        Which commit it is.
    """
    wanted = os.environ.get("ROPEWAY_UPGRADE_FROM", "HEAD~1")
    if shutil.which("git") is None:
        pytest.skip("git is not installed, so there is no earlier version")
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")
    if commit.returncode != 0:
        pytest.skip(f"the history has no commit {wanted} (ROPEWAY_UPGRADE_FROM names another one)")
    name = commit.stdout.decode().strip()
    there = _git("ls-tree", "--name-only", name).stdout.decode().split()
    archive = _git("archive", "--format=tar", name, *(room for room in ROOMS if room in there))
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return name


def next_minor(folder: Path) -> str:
    """Write a version whose messages have fields that this one does not know, and whose scripts are other ones."""
    _copy(folder)
    protocol = folder / "shared" / "protocol.py"
    text = protocol.read_text("utf-8")
    for message in _MESSAGES:
        head = re.search(rf'^class {message}\(.*?\n    """.*?"""\n\n', text, re.MULTILINE | re.DOTALL)
        assert head is not None, message
        text = text[: head.end()] + _NEW_FIELD + text[head.end() :]
    protocol.write_text(text, "utf-8")
    _change(folder / "shared" / "lua" / "_lib.lua", lambda lua: f"{lua}\n-- of the next minor version\n")
    return "next minor"


def next_major(folder: Path) -> str:
    """Write a version that speaks the next wire version."""
    from shared.protocol import WIRE_VERSION

    _copy(folder)
    for file, line in (("protocol.py", "WIRE_VERSION: Final = {}"), ("lua/_lib.lua", "local WIRE_VERSION = {}")):
        now, then = line.format(WIRE_VERSION), line.format(WIRE_VERSION + 1)
        _change(folder / "shared" / file, partial(_replaced, now=now, then=then))
    return "next major"


def script_shas(folder: Path) -> Mapping[str, str]:
    """SHA-1 of each script of a version, by name."""
    code = (
        "import json; from importlib.resources import files; from shared.scripts import load\n"
        "files = [file.name for file in files('shared').joinpath('lua').iterdir()]\n"
        "names = [name[:-4] for name in files if name.endswith('.lua') and name[0] != '_']\n"
        "print(json.dumps({name: load(name).sha for name in names}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(folder), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def environment(folder: Path) -> dict[str, str]:
    """Variables with which Python takes the rooms of a folder, and none of this project's."""
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def _copy(folder: Path) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))


def _change(file: Path, change: Callable[[str], str]) -> None:
    file.write_text(change(file.read_text("utf-8")), "utf-8")


def _replaced(text: str, *, now: str, then: str) -> str:
    assert text.count(now) == 1, now
    return text.replace(now, then)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
