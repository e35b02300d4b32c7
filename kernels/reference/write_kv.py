"""Write keys and values of this step's tokens into their slots of the KV cache."""

from __future__ import annotations

import torch

from kernels.ops import register


@register("write_kv", "reference")
def write_kv(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store token `t` in slot `slot_mapping[t]`, in place.

    Args:
        kv: [tokens, 2 * kv_heads * head_dim], keys then values; rows may be strided.
        cache: [blocks, block_size, 2, kv_heads, head_dim], contiguous.
        slot_mapping: [tokens] int64, `block * block_size + offset`; distinct.
    """
    cache.view(-1, kv.shape[1]).index_copy_(0, slot_mapping, kv)
