"""Projects for Node: their packages installed as the lock file has them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

#: The least major version that the packages take.
NODE = 20
_INSTALL_S = 240


def install(files: Iterable[Path], folder: Path) -> Path:
    """Copy files of a project, `package-lock.json` among them, into a folder and install its packages there.

    Skips the test where there is no node, npm or registry.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("neither node nor npm: these checks need both")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    major = re.match(r"v(\d+)", version)
    if major is None or int(major[1]) < NODE:
        pytest.skip(f"node {version.strip()} is older than {NODE}")
    for file in files:
        shutil.copy(file, folder)
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install the packages here: {done.stderr[-300:]}")
    return folder
