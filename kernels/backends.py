"""Whether Triton can be used in this process, and its interpreter where kernels compute on a CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Literal

from kernels.errors import KernelsUnavailableError

#: Which kernels an engine takes: those of its device, or those of one backend wherever it runs.
Kernels = Literal["auto", "triton", "reference"]

TRITON = "triton"
_INTERPRET = "TRITON_INTERPRET"


def has_triton() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("triton") is not None


def prepare_triton(device_type: str) -> None:
    """See to it that Triton's kernels can be used on a type of device; on a CPU that is the interpreter.

    Triton reads its environment when it is imported, so the first engine of a process decides for all of them.

    Raises:
        KernelsUnavailableError: it is not installed, or was imported for another type of device before.
    """
    if not has_triton():
        raise KernelsUnavailableError("the package triton is not installed: pip install 'ropeway[gpu]'")
    wanted = device_type == "cpu"
    if "triton" not in sys.modules and wanted:
        os.environ[_INTERPRET] = "1"
    import triton

    if bool(triton.knobs.runtime.interpret) != wanted:
        raise KernelsUnavailableError(
            f"this process has Triton {'compiling for a GPU' if wanted else 'interpreting on a CPU'}: "
            f"start another one {'with' if wanted else 'without'} {_INTERPRET}=1"
        )
