"""How OpenMP's threads wait: what `import engine` puts into the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_CODE = f"import engine, os; print(*[os.environ.get(name) for name in {_NAMES}])"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "PASSIVE 1000"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE 7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "PASSIVE None"),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}, "PASSIVE 1000"),
    ],
)
def test_threads_wait_as_the_environment_says_else_by_a_short_spin(own: dict[str, str], expected: str) -> None:
    others = {name: value for name, value in os.environ.items() if name not in _NAMES}
    answer = subprocess.run(
        [sys.executable, "-c", _CODE], env=others | own, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == expected
