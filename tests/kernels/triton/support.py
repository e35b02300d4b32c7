"""What the tests of Triton's kernels share: tolerances, poison, and modules with a mistake put in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: A unit in the last place, relative to the number, at most. A result that is rounded once is half of it off; what is
#: rounded within may be off by the other half.
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> None:
    """Every number is there and no further off than `absolute + relative * |expected|`; `expected` is float64."""
    assert actual.shape == expected.shape
    wrong = ~((actual.double() - expected).abs() <= absolute + relative * expected.abs())
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} are off, first at {place}: {actual[place]} for {expected[place]}"
        )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch allocates without a value holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def strided(rows: int, width: int, dtype: torch.dtype, gap: int = 16) -> torch.Tensor:
    """Random rows with NaN between them."""
    whole = torch.full((rows, width + gap), float("nan"), dtype=dtype)
    whole[:, :width] = torch.randn(rows, width).to(dtype)
    return whole[:, :width]


def mutated(module: str, old: str, new: str, folder: Path) -> ModuleType:
    """`kernels.triton.<module>` with one piece of its source replaced; nothing is registered by it."""
    found = importlib.util.find_spec(f"kernels.triton.{module}")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text("utf-8")
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module}"
    path = folder / f"mutated_{module}.py"
    path.write_text(source.replace(old, new), "utf-8")
    spec = importlib.util.spec_from_file_location(f"mutated_{module}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "register", _no_register)
        patch.setitem(sys.modules, spec.name, loaded)  # where dataclasses look for it
        spec.loader.exec_module(loaded)
    return loaded


def _no_register(operation: str, backend: str) -> Callable[[Any], Any]:
    return lambda kernel: kernel
