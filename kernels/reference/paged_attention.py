"""Causal attention over block tables, for decodes and prefill chunks of one mixed batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.attention import AttentionBatch, AttentionGroup
from kernels.ops import register


@register("paged_attention", "reference")
def paged_attention(query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Attention of each token to its sequence's cached tokens up to itself.

    Args:
        query: [tokens, heads, head_dim]; tokens may be strided.
        cache: [blocks, block_size, 2, kv_heads, head_dim]; this step's tokens are written already.
        batch: groups that cover every row once.
        scale: of the scores.

    Returns:
        [tokens, heads * head_dim].
    """
    if len(batch.groups) == 1:
        return _attend_rows(query, cache, batch.groups[0], scale)
    parts: list[torch.Tensor] = []
    first = 0
    for group in batch.groups:
        parts.append(_attend_rows(query.narrow(0, first, group.rows), cache, group, scale))
        first += group.rows
    return torch.cat(parts)


def _attend_rows(query: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, scale: float) -> torch.Tensor:
    """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
    if group.pad is None or group.unpad is None:
        return _attend(query, cache, group, scale).reshape(group.rows, -1)
    padded = _attend(query.index_select(0, group.pad), cache, group, scale)
    return padded.reshape(len(group.pad), -1).index_select(0, group.unpad)


def _attend(query: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, scale: float) -> torch.Tensor:
    """[batch * queries, heads, head_dim] -> [batch, ..., head_dim] in the same order; gathers its blocks once."""
    _, block_size, _, kv_heads, dim = cache.shape
    batch, queries = group.batch, group.queries
    keys = len(group.blocks) // batch * block_size
    kv = cache.index_select(0, group.blocks).view(batch, keys, 2, kv_heads, dim).narrow(1, 0, group.keys)
    key, value = kv.select(2, 0).transpose(1, 2), kv.select(2, 1).transpose(1, 2)  # [batch, kv_heads, keys, dim]
    per_kv_head = query.shape[1] // kv_heads
    if queries == 1:
        # The query heads of one KV head are rows of one product: nothing is repeated.
        rows = query.view(batch, kv_heads, per_kv_head, dim)
        return F.scaled_dot_product_attention(rows, key, value, attn_mask=group.mask, scale=scale)
    # KV heads join the batch axis, so that query heads can share one key by a stride of 0.
    rows = query.view(batch, queries, kv_heads, per_kv_head, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch * kv_heads, per_kv_head, queries, dim)
    shape = (batch * kv_heads, per_kv_head, group.keys, dim)
    key = key.reshape(batch * kv_heads, 1, group.keys, dim).expand(shape)
    value = value.reshape(batch * kv_heads, 1, group.keys, dim).expand(shape)
    result = F.scaled_dot_product_attention(rows, key, value, attn_mask=group.mask, scale=scale)
    return result.unflatten(0, (batch, kv_heads)).permute(0, 3, 1, 2, 4)
