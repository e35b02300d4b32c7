"""The low-rank update of a linear layer's output, of another adapter for each row (LoRA: Hu et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.lora import FixedRows, LoraBatch, LoraLayer
from kernels.ops import register


@register("lora_delta", "reference")
def lora_delta(x: torch.Tensor, layer: LoraLayer, batch: LoraBatch | FixedRows) -> torch.Tensor:
    """What each row's adapter adds to its output: `x @ a.T @ b` of its slot, and exactly zero for the base model.

    Args:
        x: [tokens, inputs], input of the layer.
        layer: the adapters in their slots.
        batch: slots of the rows; fixed ones are served by the references and by Triton.

    Returns:
        [tokens, outputs] float32.
    """
    delta = x.new_zeros((len(x), layer.b.shape[2]), dtype=torch.float32)
    if isinstance(batch, FixedRows):
        for slot in range(len(layer.a)):
            mine = torch.cat(
                [
                    x.float() @ a.float().T @ b.float()
                    for a, b in zip(layer.a[slot], layer.b[slot].split(layer.widths.tolist(), 1), strict=True)
                ],
                1,
            )
            delta = torch.where((batch.slots == slot).unsqueeze(1), mine, delta)
        return delta
    for slot, rows in _rows_by_slot(batch, x.device):
        first = 0
        for part, width in enumerate(layer.widths.tolist()):
            low = x[rows].float() @ layer.a[slot, part].float().T
            delta[rows, first : first + width] = low @ layer.b[slot, :, first : first + width].float()
            first += width
    return delta


@register("embed_delta", "reference")
def embed_delta(ids: torch.Tensor, layer: LoraLayer, batch: LoraBatch | FixedRows) -> torch.Tensor:
    """What each row's adapter adds to the embedding of its token: `a[token] @ b` of its slot.

    Args:
        ids: [tokens] int64.
        layer: with `a` of [slots, 1, vocab, max_rank], a row for each token.
        batch: slots of the rows.

    Returns:
        [tokens, hidden] float32.
    """
    delta = torch.zeros((len(ids), layer.b.shape[2]), device=ids.device)
    if isinstance(batch, FixedRows):
        for slot in range(len(layer.a)):
            mine = layer.a[slot, 0].index_select(0, ids).float() @ layer.b[slot].float()
            delta = torch.where((batch.slots == slot).unsqueeze(1), mine, delta)
        return delta
    for slot, rows in _rows_by_slot(batch, ids.device):
        delta[rows] = layer.a[slot, 0, ids[rows]].float() @ layer.b[slot].float()
    return delta


def _rows_by_slot(batch: LoraBatch, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    for slot in batch.active.tolist():
        yield slot, torch.from_numpy((batch.slots == slot).nonzero()[0]).to(device)
