"""Causal attention over block tables, for decodes and prefill chunks of one mixed batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.attention import AttentionBatch, AttentionGroup, FixedDecode
from kernels.ops import register


@register("paged_attention", "reference")
def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each token to its sequence's cached tokens up to itself.

    The options by keyword are those of the reference and of Triton; no CPU path has them.

    Args:
        query: [tokens, heads, head_dim]; tokens may be strided.
        cache: [blocks, block_size, 2, kv_heads, head_dim]; this step's tokens are written already.
        batch: groups that cover every row once, or a fixed decode, which has none of the options.
        scale: of the scores.
        window: a token sees so many at most, itself included; None: all before it.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None: they stay.
        scales: of a cache in float8, [2] float32; see `write_kv`.

    Returns:
        [tokens, heads * head_dim].
    """
    options = window is not None or soft_cap is not None or scales is not None
    if batch.fixed is not None:
        if options:
            raise ValueError("a fixed decode has neither window nor soft cap nor scales")
        return _attend_fixed(query, cache, batch.fixed, scale)
    if options:
        return _attend_plainly(query, cache, batch, scale, window, soft_cap, scales)
    if len(batch.groups) == 1:
        return attend_rows(query, cache, batch.groups[0], scale)
    parts: list[torch.Tensor] = []
    first = 0
    for group in batch.groups:
        parts.append(attend_rows(query.narrow(0, first, group.rows), cache, group, scale))
        first += group.rows
    return torch.cat(parts)


def attend_rows(query: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, scale: float) -> torch.Tensor:
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


def _attend_fixed(query: torch.Tensor, cache: torch.Tensor, fixed: FixedDecode, scale: float) -> torch.Tensor:
    """[batch, heads, head_dim] -> [batch, heads * head_dim]; every sequence is padded to the most keys."""
    _, block_size, _, kv_heads, dim = cache.shape
    tables = fixed.tables[:, : -(-fixed.most // block_size)]
    batch, keys = len(tables), tables.shape[1] * block_size
    hidden = torch.arange(keys, device=query.device) >= fixed.lengths.unsqueeze(1)  # [batch, keys]
    kv = cache.index_select(0, tables.reshape(-1)).view(batch, keys, 2, kv_heads, dim)
    # Zeros, since a masked NaN is still one; and there may be anything.
    kv = kv.masked_fill(hidden.view(batch, keys, 1, 1, 1), 0.0)
    key, value = kv.select(2, 0).transpose(1, 2), kv.select(2, 1).transpose(1, 2)  # [batch, kv_heads, keys, dim]
    rows = query.reshape(batch, kv_heads, query.shape[1] // kv_heads, dim)
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    result = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask.view(batch, 1, 1, keys), scale=scale)
    return result.reshape(batch, -1)


def _attend_plainly(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence after the other, in float32; needs no masks of the groups."""
    by_kind = torch.ones(2, device=cache.device) if scales is None else scales
    results: list[torch.Tensor] = []
    first = 0
    for group in batch.groups:
        tables = group.blocks.view(group.batch, -1)
        for table, count, length in zip(tables, group.counts.tolist(), group.lengths.tolist(), strict=True):
            kv = cache[table].flatten(0, 1)[:length].float() * by_kind.view(2, 1, 1)  # [keys, 2, kv_heads, dim]
            rows = query.narrow(0, first, count).float()
            keys, values = kv.repeat_interleave(query.shape[1] // kv.shape[2], 2).permute(1, 2, 0, 3)
            score = rows.transpose(0, 1) @ keys.transpose(1, 2) * scale  # [heads, count, keys]
            if soft_cap is not None:
                score = soft_cap * torch.tanh(score / soft_cap)
            position = torch.arange(length - count, length, device=query.device).unsqueeze(1)
            key = torch.arange(length, device=query.device)
            hidden = key > position
            if window is not None:
                hidden |= key <= position - window
            weight = score.masked_fill_(hidden, float("-inf")).softmax(-1)
            results.append((weight @ values).transpose(0, 1).reshape(count, -1).to(query.dtype))
            first += count
    return torch.cat(results)
