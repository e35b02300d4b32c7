"""Forward passes that a device may record once and then replay, without going through Python again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.attention import AttentionBatch
from kernels.ops import register

#: Tokens, positions, KV cache and batch to hidden states; see `engine.models.registry.CausalLM.forward`.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]


@register("capture", "reference")
def capture(forward: Forward, cache: torch.Tensor) -> Step:
    """A function `tokens, positions, batch -> forward(tokens, positions, cache, batch)`.

    Args:
        forward: does the same operations whatever the batch; besides those of the table only views.
        cache: [layers, blocks, block_size, 2, kv_heads, head_dim].

    Returns:
        What gives [tokens, hidden], valid until the next call.
    """

    def step(tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        return forward(tokens, positions, cache, batch)

    return step
