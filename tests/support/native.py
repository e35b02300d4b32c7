"""The native kernels, for tests that run on them as well as on torch's."""

from __future__ import annotations

import pytest

from engine.cache_folder import default_cache_dir
from kernels.cpu import native
from kernels.native_build import compiler


def load_native(threads: int = 2) -> None:
    """Load them; the test is skipped where there is no compiler, and nowhere else."""
    try:
        compiler()
    except native.NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
    native.load(default_cache_dir())
    native.set_threads(threads)
