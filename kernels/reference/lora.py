"""The low-rank update of a linear layer's output, of another adapter for each row (LoRA: Hu et al., 2021)."""

from __future__ import annotations

import torch

from kernels.lora import LoraBatch, LoraLayer
from kernels.ops import register


@register("add_lora", "reference")
def add_lora(y: torch.Tensor, x: torch.Tensor, layer: LoraLayer, batch: LoraBatch) -> None:
    """Add `x @ a.T @ b` of each row's slot to its row of `y`, in place; rows of the base model stay as they are.

    Args:
        y: [tokens, outputs], output of the layer.
        x: [tokens, inputs], its input.
        layer: the adapters in their slots.
        batch: slots of the rows.
    """
    for slot in batch.active.tolist():
        rows = torch.nonzero(batch.slots == slot).squeeze(1)
        first = 0
        for part, width in enumerate(layer.widths):
            low = x[rows].float() @ layer.a[slot, part].float().T
            delta = low @ layer.b[slot, :, first : first + width].float()
            y[rows, first : first + width] = (y[rows, first : first + width].float() + delta).to(y.dtype)
            first += width
