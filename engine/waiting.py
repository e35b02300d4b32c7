"""How OpenMP's threads wait for a parallel region: chosen before torch, which reads it once. Imports no torch."""

from __future__ import annotations

import os

from engine.cpu_share import counts_waiting

#: Spins of GNU's OpenMP, some 0.05 us each. The long ones outlast what lies between two products of a layer; they are
#: for processes that see when others want their CPUs, and then compute on fewer threads (`engine.cpu_share`).
SHORT, LONG = "1000", "10000"


def choose_waiting() -> None:
    """Into the environment, unless it has a policy: to sleep at once would cost a wake-up for each region, of which a
    batch has some 150 a step with torch's kernels; to spin for as long as OpenMP does by default starves the thread
    that is waited for as soon as another process needs a core (docs/kernels.md)."""
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # GNU's library alone knows it. Whoever has chosen a policy has that library's number of spins with it.
    os.environ.setdefault("GOMP_SPINCOUNT", LONG if counts_waiting() else SHORT)


def stays_awake() -> bool:
    """Whether threads spin for as long as `choose_waiting` has them where this process's waiting is counted."""
    chosen = os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")
    return chosen == ("PASSIVE", LONG) and counts_waiting()
