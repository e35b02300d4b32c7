"""LoRA for any mix of adapters in a handful of calls: rows are gathered by slot, padded, and multiplied as batches."""

from __future__ import annotations

import torch

from kernels.lora import LoraBatch, LoraLayer
from kernels.ops import register


@register("lora_delta", "cpu")
def lora_delta(x: torch.Tensor, layer: LoraLayer, batch: LoraBatch) -> torch.Tensor:
    """Contract of the reference; the number of calls does not depend on the number of rows or adapters.

    The grouping is that of Punica and S-LoRA (Chen et al., 2023; Sheng et al., 2023), with batched products of torch.
    """
    parts, inputs, outputs = len(layer.widths), x.shape[1], layer.b.shape[2]
    groups, rank = len(batch.active), int(layer.ranks[batch.active].max())
    delta = x.new_zeros((len(x), outputs), dtype=torch.float32)
    if not rank:
        return delta
    active = torch.from_numpy(batch.active).to(x.device)
    a = layer.a.index_select(0, active)[:, :, :rank].reshape(groups, parts * rank, inputs)
    b = layer.b.index_select(0, active)[:, :rank]
    low = torch.bmm(x.index_select(0, batch.gather).view(groups, -1, inputs), a.transpose(1, 2))
    first = 0
    for part, width in enumerate(layer.widths.tolist()):
        mine = low[:, :, part * rank : (part + 1) * rank]
        added = torch.bmm(mine, b[:, :, first : first + width]).view(-1, width)
        delta.narrow(1, first, width).index_copy_(0, batch.rows, added.index_select(0, batch.valid).float())
        first += width
    return delta
