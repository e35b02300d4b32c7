"""The specification of each operation in plain torch, one file an operation. Runs on every device."""

from kernels.reference import (
    copy_blocks,
    linear,
    logprobs,
    lora,
    paged_attention,
    rms_norm,
    rotary,
    sampling,
    silu_and_mul,
    write_kv,
)

__all__ = [
    "copy_blocks",
    "linear",
    "logprobs",
    "lora",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sampling",
    "silu_and_mul",
    "write_kv",
]
