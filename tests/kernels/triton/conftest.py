"""The tests in this folder run Triton's kernels in its interpreter, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.backends import has_triton, prepare_triton
from tests.kernels.triton.support import poisoned_memory

if not has_triton():  # there are wheels for Linux on x86-64 and aarch64 alone
    pytest.skip("triton is not installed", allow_module_level=True)
prepare_triton("cpu")


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned_memory():
        yield
