"""The example of direct use of Redis, as its users run it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from shared.contract import export
from tests.support.node import install
from tests.support.stack import ROOT

_FILES = ("direct_redis.mjs", "package.json", "package-lock.json")
_RUN_S = 240


class DirectRedis:
    """The example with its packages and an exported contract, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = install((ROOT / "examples" / name for name in _FILES), folder)
        export(folder / "contract")

    def command(self, url: str, prompt: str, *more: str) -> list[str]:
        """How it is run; in `folder`."""
        return ["node", "direct_redis.mjs", prompt, "--redis", url, *more]

    def run(self, url: str, prompt: str, *more: str) -> tuple[str, dict[str, Any]]:
        """What it has written, and what it says of the job. Raises AssertionError where it fails."""
        command = self.command(url, prompt, *more)
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=_RUN_S, check=False, encoding="utf-8"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.removesuffix("\n"), json.loads(done.stderr.splitlines()[-1])
