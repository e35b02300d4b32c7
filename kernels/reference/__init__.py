"""The specification of each operation in plain torch, one file an operation. Runs on every device."""

from kernels.reference import (
    capture,
    copy_blocks,
    embed,
    linear,
    logprobs,
    lora,
    lora_store,
    pack,
    paged_attention,
    rms_norm,
    rotary,
    sampling,
    screen,
    silu_and_mul,
    unembed,
    write_kv,
)

__all__ = [
    "capture",
    "copy_blocks",
    "embed",
    "linear",
    "logprobs",
    "lora",
    "lora_store",
    "pack",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sampling",
    "screen",
    "silu_and_mul",
    "unembed",
    "write_kv",
]
