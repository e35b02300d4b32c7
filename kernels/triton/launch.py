"""What all Triton launches share: the target, checks of inputs before a launch, and the types that products take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.errors import KernelInputError

# Triton 3.9 warns where nobody says whether products and sums may be fused: they may, as before.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

#: Whether kernels run in Triton's interpreter, on a CPU. Decided when Triton is imported.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Dtypes of a KV cache in 8 bits.
FLOAT8 = (torch.float8_e4m3fn,)

_TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@lru_cache(maxsize=16)
def target_of(device: torch.device) -> str:
    """`sm_90` and the like, `gfx942` and the like, or `interpreter`: what launch parameters are chosen by."""
    if INTERPRETED or device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def has_float8(target: str) -> bool:
    """Whether a target converts float8_e4m3fn: Ada, Hopper and later; AMD's CDNA 3 has other numbers of 8 bits."""
    return target == "interpreter" or (target.startswith("sm_") and int(target.removeprefix("sm_")) >= 89)


def dot_dtype(dtype: torch.dtype) -> Any:
    """Of the operands of matrix products. The interpreter cannot compute in bfloat16, where float32 holds it all."""
    return tl.float32 if INTERPRETED else _TRITON_DTYPES[dtype]


def power_of_2(number: int) -> int:
    """The least that is no less than the number."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, by: int) -> int:
    """Divided and rounded up."""
    return -(-number // by)


def check(operation: str, condition: bool, message: str) -> None:
    """
    Raises:
        KernelInputError: the condition does not hold.
    """
    if not condition:
        raise KernelInputError(f"{operation}: {message}")


def check_tensor(
    operation: str,
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Whether a tensor is what a kernel will take it for.

    Args:
        dtypes: that are served.
        shape: expected; None: any size.
        device: where it has to be; None: a CUDA device, or a CPU under the interpreter.
        contiguous: all of it; else only its last axis must be.

    Raises:
        KernelInputError: it is not.
    """
    found = tuple(tensor.shape)
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise KernelInputError(f"{operation}: {name} is {tensor.dtype}, served are {names}")
    if len(found) != len(shape) or any(size not in (None, own) for size, own in zip(shape, found, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelInputError(f"{operation}: {name} has shape {list(found)}, not [{wanted}]")
    if contiguous and not tensor.is_contiguous():
        raise KernelInputError(f"{operation}: {name} must be contiguous, its strides are {list(tensor.stride())}")
    if tensor.numel() and tensor.stride(-1) != 1 and found[-1] > 1:
        raise KernelInputError(
            f"{operation}: the last axis of {name} must be contiguous, its stride is {tensor.stride(-1)}"
        )
    expected = "cpu" if INTERPRETED else "cuda"
    if device is None and tensor.device.type != expected:
        raise KernelInputError(f"{operation}: {name} is on {tensor.device}, this process launches on {expected}")
    if device is not None and tensor.device != device:
        raise KernelInputError(f"{operation}: {name} is on {tensor.device}, not on {device}")
