"""Decodes of many sequences in bfloat16 as two batched products; same contract as the reference.

torch's fused attention takes some 10 us for the few rows of a KV head, however few keys there are: its tiles are made
for prompts. Scores are rounded once, as `transformers` does in its plain implementation.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention import AttentionBatch, AttentionGroup
from kernels.cpu.linear import packable
from kernels.cpu.threads import FEW_ROWS, SMALL, alone
from kernels.ops import register
from kernels.reference.paged_attention import attend_rows
from kernels.reference.paged_attention import paged_attention as reference

#: Sequences times KV heads from which on two products are faster: of 3 KV heads 24 against 43 us for one sequence, 170
#: against 100 us for 8, 950 against 290 us for 32 (192 keys, one core).
_LEAST = 12


@register("paged_attention", "cpu")
def paged_attention(
    query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float, **options: Any
) -> torch.Tensor:
    """Contract of the reference."""
    if options:
        return reference(query, cache, batch, scale, **options)
    if not any(_fits(query, cache, group) for group in batch.groups):
        few = len(query) <= FEW_ROWS and _bytes(cache, batch) <= SMALL
        return alone(reference, query, cache, batch, scale) if few else reference(query, cache, batch, scale)
    parts: list[torch.Tensor] = []
    first = 0
    for group in batch.groups:
        attend = _decode if _fits(query, cache, group) else attend_rows
        parts.append(attend(query.narrow(0, first, group.rows), cache, group, scale))
        first += group.rows
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bytes(cache: torch.Tensor, batch: AttentionBatch) -> int:
    """Of the blocks of a layer that are gathered."""
    return sum(len(group.blocks) for group in batch.groups) * cache[0].numel() * cache.element_size()


def _fits(query: torch.Tensor, cache: torch.Tensor, group: AttentionGroup) -> bool:
    many = group.queries == 1 and group.pad is None and group.batch * cache.shape[3] >= _LEAST
    return many and query.dtype == cache.dtype == torch.bfloat16 and packable(query)


def _decode(query: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, scale: float) -> torch.Tensor:
    """[batch, heads, head_dim] -> [batch, heads * head_dim]."""
    batch, keys, kv_heads, dim = group.batch, group.keys, cache.shape[3], cache.shape[4]
    kv = cache.index_select(0, group.blocks).view(batch, -1, 2, kv_heads, dim).narrow(1, 0, keys)
    key, value = kv.permute(2, 0, 3, 1, 4).contiguous().view(2, batch * kv_heads, keys, dim).unbind(0)
    rows = query.reshape(batch * kv_heads, -1, dim)
    scores = torch.bmm(rows, key.transpose(1, 2)).float().mul_(scale)
    if group.mask is not None:
        scores.view(batch, kv_heads, -1, keys).add_(group.mask)
    return torch.bmm(scores.softmax(-1).to(query.dtype), value).view(batch, -1)
