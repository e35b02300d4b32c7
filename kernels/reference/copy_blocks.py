"""Copy whole blocks of the KV cache, for copy on write."""

from __future__ import annotations

import torch

from kernels.ops import register


@register("copy_blocks", "reference")
def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy block `source[i]` to `destination[i]` in every layer, in place; all sources are read first.

    Args:
        cache: [layers, blocks, block_size, 2, kv_heads, head_dim].
        source: [copies] int64.
        destination: [copies] int64, distinct.
    """
    cache.index_copy_(1, destination, cache.index_select(1, source))
