"""Triton kernels for the operations of the references, one file an operation, registered for `triton`.

On a GPU they are compiled; in a process that computes on a CPU they run in Triton's interpreter, which is for tests.
Import it through `kernels.ops`, which sees to that. What has no kernel here is computed by the reference.
"""

from kernels.triton import (
    embed,
    gelu_and_mul,
    lora,
    paged_attention,
    penalties,
    philox,
    rms_norm,
    rotary,
    sampling,
    silu_and_mul,
    write_kv,
)

__all__ = [
    "embed",
    "gelu_and_mul",
    "lora",
    "paged_attention",
    "penalties",
    "philox",
    "rms_norm",
    "rotary",
    "sampling",
    "silu_and_mul",
    "write_kv",
]
