"""The `openai` package for Node against the whole system; what it checks is in `node/client.mjs`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.openai_compat.conftest import KEY, MODEL
from tests.support.stack import Stack

FOLDER = Path(__file__).parent / "node"
#: The least major version that the package takes.
NODE = 20
INSTALL_TIMEOUT_S, CHECKS_TIMEOUT_S = 120, 120


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as the lock file has it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("neither node nor npm: these checks need both")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    major = re.match(r"v(\d+)", version)
    if major is None or int(major[1]) < NODE:
        pytest.skip(f"node {version.strip()} is older than {NODE}")
    folder = tmp_path_factory.mktemp("node")
    for file in FOLDER.iterdir():
        shutil.copy(file, folder)
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install the package here: {done.stderr[-300:]}")
    return folder


def test_every_check_of_the_node_client(stack: Stack, project: Path) -> None:
    command = ["node", "client.mjs", f"{stack.url}/v1", KEY, MODEL]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=CHECKS_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    named = re.findall(r"^  async (\w+)\(", (FOLDER / "client.mjs").read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"^ok (\w+)$", done.stdout, re.MULTILINE) == named
