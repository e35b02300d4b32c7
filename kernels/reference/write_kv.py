"""Write keys and values of this step's tokens into their slots of the KV cache."""

from __future__ import annotations

import torch

from kernels.ops import register


@register("write_kv", "reference")
def write_kv(
    kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Store token `t` in slot `slot_mapping[t]`, in place.

    Args:
        kv: [tokens, 2 * kv_heads * head_dim], keys then values; rows may be strided.
        cache: [blocks, block_size, 2, kv_heads, head_dim], contiguous, in the dtype of `kv` or in float8_e4m3fn.
        slot_mapping: [tokens] int64, `block * block_size + offset`; distinct.
        scales: for a cache in float8 and for that alone, [2] float32: keys and values are divided by theirs first, and
            what is then out of range becomes the largest number.
    """
    if scales is None:
        cache.view(-1, kv.shape[1]).index_copy_(0, slot_mapping, kv)
        return
    most = torch.finfo(cache.dtype).max
    small = kv.float().unflatten(1, (2, -1)) / scales.view(2, 1)
    small = small.clamp_(-most, most).to(cache.dtype).flatten(1)
    # Not every device copies by index in 8 bits; the bytes are what counts.
    cache.view(torch.uint8).view(-1, kv.shape[1]).index_copy_(0, slot_mapping, small.view(torch.uint8))
