"""Owns weights, KV cache and device: runs a step's plan as one forward pass and samples."""

from __future__ import annotations

import torch

from engine.batch import CacheLayout, build_batch
from engine.models.registry import CausalLM
from engine.plan import Sampled, Span, StepPlan
from engine.sampler import Sampler
from kernels.ops import Ops


class ModelRunner:
    """Implements `engine.plan.Runner` over a model and a paged KV cache.

    Attributes:
        num_blocks: blocks that sequences may use.
        block_size: tokens per block.
        vocab_size: logits per row.
    """

    def __init__(self, model: CausalLM, sampler: Sampler, ops: Ops, num_blocks: int, block_size: int) -> None:
        """Allocate the KV cache, [layers, num_blocks + 1, block_size, 2, kv_heads, head_dim]; the last block pads."""
        config = model.config
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, config.vocab_size
        self._model, self._sampler, self._ops = model, sampler, ops
        # Zeros, because padding is read and then masked: what was never written must be finite.
        self._cache = torch.zeros(
            (config.num_hidden_layers, num_blocks + 1, block_size, 2, config.num_key_value_heads, config.head_dim),
            dtype=model.dtype,
            device=model.device,
        )
        self._layout = CacheLayout(block_size, num_blocks, config.num_key_value_heads, model.dtype, model.device)
        self._tainted: set[int] = set()

    def has_adapter(self, adapter: str) -> bool:
        """No adapter is served: see `engine.plan.Runner.has_adapter`."""
        return False

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """Run one pass; see `engine.plan.Runner.execute`."""
        if not plan.spans:
            return []
        if plan.copies:
            source, destination = torch.tensor(plan.copies, device=self._model.device).unbind(1)
            self._ops.copy_blocks(self._cache, source, destination)
        if self._tainted:
            self._clean(plan.spans)
        batch = build_batch(plan.spans, self._layout)
        hidden = self._model.forward(batch.tokens, batch.positions, self._cache, batch.attention)
        answers: list[Sampled | None] = [None] * len(plan.spans)
        sampled = [index for index, span in enumerate(plan.spans) if span.sample]
        if not sampled:
            return answers
        if batch.sample_rows is not None:
            hidden = hidden.index_select(0, batch.sample_rows)
        logits = self._model.logits(hidden)
        results = self._sampler.sample(logits, [plan.spans[index].sequence for index in sampled])
        for index, result in zip(sampled, results, strict=True):
            answers[index] = result
            if result.error is not None:
                self._tainted.update(plan.spans[index].sequence.block_table)
        return answers

    def _clean(self, spans: list[Span]) -> None:
        """Zero blocks that are begun anew and may hold what is not finite, from a sequence that failed.

        Attention masks the unwritten rest of a sequence's last block, but a masked NaN is still a NaN.
        """
        begun: set[int] = set()
        for span in spans:
            first = -(-span.start // self.block_size)
            last = -(-(span.start + span.count) // self.block_size)
            begun.update(span.sequence.block_table[first:last])
        dirty = sorted(begun & self._tainted)
        if dirty:
            self._cache.index_fill_(1, torch.tensor(dirty, device=self._model.device), 0.0)
            self._tainted.difference_update(dirty)
