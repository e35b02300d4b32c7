"""The table: every operation is there for every device, and chosen by preference."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from kernels.ops import BACKENDS, INVARIANT, Ops, implementation, ops_for, register

OPERATIONS = [field.name for field in fields(Ops)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_a_reference(operation: str) -> None:
    assert implementation(operation, "reference") is not None


@pytest.mark.parametrize("device", sorted(BACKENDS))
def test_device_gets_its_preferred_implementation(device: str) -> None:
    ops = ops_for(device)
    for operation in OPERATIONS:
        found = [kernel for backend in BACKENDS[device] if (kernel := implementation(operation, backend)) is not None]
        assert getattr(ops, operation) is found[0]


def test_cpu_paths_win_over_references() -> None:
    assert ops_for("cpu").rms_norm is not ops_for("cuda").rms_norm


@pytest.mark.parametrize("device", sorted(BACKENDS))
def test_deterministic_mode_takes_what_is_invariant(device: str) -> None:
    ops, plain = ops_for(device, deterministic=True), ops_for(device)
    for operation in OPERATIONS:
        invariant = implementation(operation, INVARIANT)
        assert getattr(ops, operation) is (getattr(plain, operation) if invariant is None else invariant)
    assert ops.linear is not plain.linear
    assert ops.paged_attention is not plain.paged_attention


def test_an_unknown_device_gets_the_references_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = [ops_for("tpu") for _ in range(2)]
    assert found[0] == found[1] == ops_for("cpu", kernels="reference")
    assert [record.message for record in caplog.records] == [
        "no kernels for device tpu: it computes by the references, in plain torch"
    ]


def test_unknown_operation_and_second_implementation_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown operation"):
        register("no_such_operation", "reference")
    ops_for("cpu")
    with pytest.raises(ValueError, match="has a 'reference' implementation already"):
        register("rms_norm", "reference")(lambda: None)
