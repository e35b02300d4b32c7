"""How OpenMP's threads wait: what `import engine` puts into the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.cpu_share import counts_waiting
from engine.waiting import LONG, SHORT, choose_waiting, stays_awake

_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_CODE = f"import engine, os; print(*[os.environ.get(name) for name in {_NAMES}])"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, f"PASSIVE {LONG if counts_waiting() else SHORT}"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE 7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "PASSIVE None"),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}, "PASSIVE 1000"),
    ],
)
def test_threads_wait_as_the_environment_says_else_by_a_spin(own: dict[str, str], expected: str) -> None:
    others = {name: value for name, value in os.environ.items() if name not in _NAMES}
    answer = subprocess.run(
        [sys.executable, "-c", _CODE], env=others | own, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == expected


@pytest.mark.parametrize(
    ("own", "counted", "awake"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"GOMP_SPINCOUNT": "7"}, True, False),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, True, False),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, True, False),
        # Of a process that has chosen for itself and begun this one.
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": LONG}, True, True),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": LONG}, False, False),
    ],
)
def test_threads_stay_awake_only_where_it_is_seen_when_others_want_their_cpus(
    own: dict[str, str], counted: bool, awake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("engine.waiting.counts_waiting", lambda: counted)
    choose_waiting()
    assert stays_awake() == awake
    if not own:
        assert os.environ["GOMP_SPINCOUNT"] == (LONG if counted else SHORT)
