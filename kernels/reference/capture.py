"""Forward passes that a device may record once and then replay, without going through Python again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.attention import AttentionBatch
from kernels.lora import LoraPass
from kernels.ops import register

#: Tokens, positions, KV cache, batch and adapters to hidden states; see `engine.models.registry.CausalLM.forward`.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch, LoraPass | None], torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, AttentionBatch, LoraPass | None], torch.Tensor]


@register("capture", "reference")
def capture(forward: Forward, cache: torch.Tensor) -> Step:
    """A function `tokens, positions, batch, lora -> forward(tokens, positions, cache, batch, lora)`.

    Args:
        forward: does the same operations whatever the batch, given the same layers of `lora`; besides those of the
            table only views.
        cache: [layers, blocks, block_size, 2, kv_heads, head_dim].

    Returns:
        What gives [tokens, hidden], valid until the next call.
    """

    def step(
        tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, lora: LoraPass | None
    ) -> torch.Tensor:
        return forward(tokens, positions, cache, batch, lora)

    return step
