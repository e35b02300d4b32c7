"""LoRA for any mix of adapters in a handful of calls: rows are gathered by slot, padded, and multiplied as batches."""

from __future__ import annotations

import torch

from kernels.lora import LoraBatch, LoraLayer
from kernels.ops import register


@register("add_lora", "cpu")
def add_lora(y: torch.Tensor, x: torch.Tensor, layer: LoraLayer, batch: LoraBatch) -> None:
    """Contract of the reference; the number of calls does not depend on the number of rows or adapters.

    The grouping is that of S-LoRA and Punica (Sheng et al., 2023; Chen et al., 2023), with batched products of torch.
    """
    parts, width = len(layer.widths), x.shape[1]
    groups, rank = len(batch.active), batch.rank
    a = layer.a.index_select(0, batch.active)[:, :, :rank].reshape(groups, parts * rank, width)
    b = layer.b.index_select(0, batch.active)[:, :rank]
    low = torch.bmm(x.index_select(0, batch.gather).view(groups, -1, width), a.transpose(1, 2))
    first = 0
    for part, outputs in enumerate(layer.widths):
        mine = low[:, :, part * rank : (part + 1) * rank]
        delta = torch.bmm(mine, b[:, :, first : first + outputs]).view(-1, outputs)
        y.narrow(1, first, outputs).index_add_(0, batch.rows, delta.index_select(0, batch.valid))
        first += outputs
