"""The example with twenty adapters, as a reader would start it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.stack import ROOT


@pytest.mark.model
@pytest.mark.slow
def test_twenty_adapters_through_four_slots() -> None:
    command = [sys.executable, "examples/many_adapters.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20 texts are those of their adapters alone; 20 of them differ" in done.stdout
    fills = [int(count) for count in re.findall(r"slots filled (\d+), in slots \d", done.stdout)]
    assert max(fills) == 20, "each adapter had a slot"
    assert all(int(count) <= 4 for count in re.findall(r"in slots (\d+),", done.stdout))
