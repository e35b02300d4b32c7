"""Rows of a table by number: token embeddings, and whatever else is looked up once per token."""

from __future__ import annotations

import torch

from kernels.ops import register


@register("embed", "reference")
def embed(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`table[ids]`.

    Args:
        table: [entries, width], or that as `pack` has made it.
        ids: [tokens] int64.

    Returns:
        [tokens, width] of its own memory, in the table's dtype or a wider one.
    """
    return table.index_select(0, ids)
