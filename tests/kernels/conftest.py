"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest

from kernels.ops import NATIVE, Ops, implementation, ops_for
from tests.support.native import load_native


@pytest.fixture(params=["torch", "native"])
def cpu_ops(request: pytest.FixtureRequest) -> Ops:
    """The operations for a CPU, of torch and native."""
    native = request.param == "native"
    if native:
        load_native()
    return ops_for("cpu", native=native)


@pytest.fixture(autouse=True)
def _native_backend(request: pytest.FixtureRequest) -> None:
    """Load the native kernels for tests whose parameter `backend` names them."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("backend") == NATIVE:
        load_native()
        assert implementation("linear", NATIVE) is not None
