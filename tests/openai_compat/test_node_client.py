"""The `openai` package for Node against the whole system; what it checks is in `node/client.mjs`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.openai_compat.conftest import KEY, MODEL
from tests.support.node import install
from tests.support.stack import Stack

FOLDER = Path(__file__).parent / "node"
CHECKS_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as the lock file has it."""
    return install(FOLDER.iterdir(), tmp_path_factory.mktemp("node"))


def test_every_check_of_the_node_client(stack: Stack, project: Path) -> None:
    command = ["node", "client.mjs", f"{stack.url}/v1", KEY, MODEL]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=CHECKS_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    named = re.findall(r"^  async (\w+)\(", (FOLDER / "client.mjs").read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"^ok (\w+)$", done.stdout, re.MULTILINE) == named
