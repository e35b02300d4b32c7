"""The tests in this folder run Triton's kernels in its interpreter, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.backends import prepare_triton
from kernels.errors import KernelsUnavailableError
from tests.kernels.triton.support import poisoned_memory

#: No wheel for this system; or there is a GPU, and some other test has Triton compile for it.
_reason: str | None = None
try:
    prepare_triton("cpu")
except KernelsUnavailableError as error:
    _reason = str(error)


class _SkippedModule(pytest.Module):
    """Skipped without being imported: it imports Triton."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(_reason or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if _reason is None else _SkippedModule.from_parent(parent, path=module_path)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned_memory():
        yield
