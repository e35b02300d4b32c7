"""Forward passes that a device may record once and then replay, without going through Python again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kernels.attention import AttentionBatch
from kernels.lora import LoraPass
from kernels.ops import register

#: Tokens, positions, KV cache, batch and adapters to hidden states; see `engine.models.registry.CausalLM.forward`.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch, LoraPass | None], torch.Tensor]


class PassInputs(Protocol):
    """A pass as tensors: [tokens] int64 tokens and positions, and the batch that they are."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch


Step = Callable[[PassInputs, LoraPass | None], torch.Tensor]


@register("capture", "reference")
def capture(forward: Forward, cache: torch.Tensor) -> Step:
    """A function `inputs, lora -> forward(inputs.tokens, inputs.positions, cache, inputs.attention, lora)`.

    Where `kernels.ops.reads_host` says so, its inputs may be a `HostPass` instead, which costs less.

    Args:
        forward: does the same operations whatever the batch, given the same layers of `lora`; besides those of the
            table only views.
        cache: [layers, blocks, block_size, 2, kv_heads, head_dim].

    Returns:
        What gives [tokens, hidden], valid until the next call.
    """

    @torch.inference_mode()
    def step(inputs: PassInputs, lora: LoraPass | None) -> torch.Tensor:
        return forward(inputs.tokens, inputs.positions, cache, inputs.attention, lora)

    return step
