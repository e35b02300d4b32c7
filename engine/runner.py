"""Owns weights, KV cache and device: runs a step's plan as one forward pass and samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from engine.adapters.device import DeviceAdapters
from engine.adapters.weights import Adapter
from engine.batch import Batch, CacheLayout, build_batch
from engine.cpu_share import CpuShare
from engine.host_batch import HostBatch, host_batch
from engine.kv_memory import taken_ahead, zeros
from engine.logprobs import score
from engine.models.registry import CausalLM
from engine.plan import Sampled, Span, StepPlan
from engine.request import LogprobEntry
from engine.sampler import Sampler, takes_argmax
from engine.sequence import Sequence
from kernels.blocked import BlockedLogits
from kernels.cpu.threads import sharing
from kernels.lora import Ints, LoraPass
from kernels.ops import Ops, reads_host, wants_groups
from kernels.transfer import to_device
from shared.errors import EngineError

#: Rows of logits that are scored at once: enough for the matrix product, and a bound on memory whatever the prompt.
SCORED_ROWS = 64
#: Greedy rows that are worth a pass of their own over the screened output matrix, where others take all logits anyway.
SCREENED_ROWS = 16


@dataclass(frozen=True, slots=True)
class PassRows:
    """What the host knows of a pass's rows.

    Attributes:
        order: indices of the spans, as their rows follow each other.
        sampled: see `engine.batch.Batch.sample_rows`.
        slots: adapter slot of each row; None where all are of the base model.
    """

    order: list[int]
    sampled: Ints | None
    slots: Ints | None


class ModelRunner:
    """Implements `engine.plan.Runner` over a model and a paged KV cache.

    Attributes:
        num_blocks: blocks that sequences may use.
        block_size: tokens per block.
        vocab_size: logits per row.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        ops: Ops,
        num_blocks: int,
        block_size: int,
        adapters: DeviceAdapters | None = None,
        share: CpuShare | None = None,
    ) -> None:
        """Allocate the KV cache, [layers, num_blocks + 1, block_size, 2, kv_heads, head_dim]; the last block pads.

        `share` says before each pass how many of torch's threads take part; without one, all do.
        """
        config = model.config
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, config.vocab_size
        self._model, self._sampler, self._ops = model, sampler, ops
        shape = (config.num_hidden_layers, num_blocks + 1, block_size, 2, config.num_key_value_heads, config.head_dim)
        self._cache = zeros(shape, model.dtype, model.device)
        self._ahead = taken_ahead(self._cache)
        self._layout = CacheLayout(
            block_size, num_blocks, config.num_key_value_heads, model.dtype, model.device, grouped=wants_groups(ops)
        )
        self._forward, self._on_host = ops.capture(model.forward, self._cache), reads_host(ops)
        self._adapters, self._share = adapters, share
        self._tainted: set[int] = set()

    def fill_slot(self, slot: int, adapter: Adapter) -> None:
        """See `engine.plan.Runner.fill_slot`.

        Raises:
            EngineError: the runner was made without slots.
        """
        if self._adapters is None:
            raise EngineError("this model has no adapter slots")
        self._adapters.fill(slot, adapter)

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """Run one pass; see `engine.plan.Runner.execute`."""
        if not plan.spans:
            return []
        if self._share is None:
            return self._execute(plan)
        with sharing(self._share.threads()):
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> list[Sampled | None]:
        rows, hidden = self._pass(plan)
        answers: list[Sampled | None] = [None] * len(plan.spans)
        self._sample(plan.spans, rows, hidden, answers)
        if plan.decodes < len(plan.spans):
            self._score(plan.spans, rows, hidden, answers)
        for span, answer in zip(plan.spans, answers, strict=True):
            if answer is not None and answer.error is not None:
                self._tainted.update(span.sequence.block_table)
        return answers

    def _pass(self, plan: StepPlan) -> tuple[PassRows, torch.Tensor]:
        """The forward pass: its rows and their hidden states."""
        self._copy(plan.copies)
        if self._tainted:
            self._clean(plan.spans)
        if self._ahead is not None:
            self._ahead.advance(max(span.sequence.block_table[-1] for span in plan.spans))
        batch = self._batch(plan.spans)
        rows = PassRows(batch.order, batch.sample_rows, self._slots(plan.spans, batch.order))
        return rows, self._forward(batch, self._lora(rows.slots))

    def _batch(self, spans: list[Span]) -> Batch | HostBatch:
        """As the forward pass takes it."""
        return host_batch(spans, self.block_size) if self._on_host else build_batch(spans, self._layout)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            source, destination = to_device(np.array(copies).T, self._model.device).unbind(0)
            self._ops.copy_blocks(self._cache, source, destination)

    def _slots(self, spans: list[Span], order: list[int]) -> Ints | None:
        """Adapter slot of each row; None where all are of the base model."""
        if self._adapters is None or all(span.sequence.adapter_slot < 0 for span in spans):
            return None
        ordered = [spans[index] for index in order]
        return np.repeat([span.sequence.adapter_slot for span in ordered], [span.count for span in ordered])

    def _lora(self, slots: Ints | None) -> LoraPass | None:
        """What a pass over rows with these slots needs of adapters."""
        if self._adapters is None or slots is None:
            return None
        batch = self._adapters.batch(slots)
        return None if batch is None else self._adapters.forward(batch)

    def _logits(self, hidden: torch.Tensor, slots: Ints | None, rows: Ints | None) -> BlockedLogits:
        """Of some rows, or of all."""
        if rows is None:
            return self._unembed(hidden, slots)
        chosen = hidden.index_select(0, to_device(rows, hidden.device))
        return self._unembed(chosen, None if slots is None else slots[rows])

    def _unembed(self, hidden: torch.Tensor, slots: Ints | None) -> BlockedLogits:
        if self._adapters is None or not self._adapters.changes("lm_head"):
            slots = None
        return self._model.logits(hidden, self._lora(slots))

    def _sample(self, spans: list[Span], rows: PassRows, hidden: torch.Tensor, answers: list[Sampled | None]) -> None:
        """The next token of each span that samples."""
        sampled = [index for index, span in enumerate(spans) if span.sample]
        if not sampled:
            return
        sequences = [spans[index].sequence for index in sampled]
        rest = list(range(len(sampled)))
        if self._model.screens:
            for place, token in self._greedy(sequences, rows, hidden):
                answers[sampled[place]] = Sampled(token)
            rest = [place for place, index in enumerate(sampled) if answers[index] is None]
        if not rest:
            self._sampler.rest()
            return
        with torch.inference_mode():
            logits = self._logits(hidden, rows.slots, _some(rows.sampled, rest, len(sampled)))
            results = self._sampler.sample(logits, [sequences[place] for place in rest])
        for place, result in zip(rest, results, strict=True):
            answers[sampled[place]] = result

    def _greedy(self, sequences: list[Sequence], rows: PassRows, hidden: torch.Tensor) -> list[tuple[int, int]]:
        """Places and tokens of sequences whose token can be told without all their logits."""
        if rows.slots is not None and self._adapters is not None and self._adapters.changes("lm_head"):
            return []
        places = [place for place, sequence in enumerate(sequences) if takes_argmax(sequence)]
        if not places or len(places) < min(len(sequences), SCREENED_ROWS):
            return []
        chosen = _some(rows.sampled, places, len(sequences))
        if chosen is not None:
            hidden = hidden.index_select(0, to_device(chosen, hidden.device))
        tokens = self._model.greedy(hidden)
        return [(place, token) for place, token in zip(places, tokens, strict=True) if token >= 0]

    @torch.inference_mode()
    def _score(self, spans: list[Span], rows: PassRows, hidden: torch.Tensor, answers: list[Sampled | None]) -> None:
        """Log probabilities of the prompts' tokens, some rows at a time. A span keeps its first error."""
        scored = _scored(spans, rows.order)
        while part := list(islice(scored, SCORED_ROWS)):
            index = np.array([row for row, _, _ in part])
            counts = [spans[span].sequence.params.prompt_logprobs or 0 for _, span, _ in part]
            logits = self._logits(hidden, rows.slots, index)
            results = score(self._ops, logits, [token for _, _, token in part], counts)
            for (_, span, _), result in zip(part, results, strict=True):
                answer = answers[span]
                if answer is None:
                    answer = answers[span] = Sampled(None)
                if isinstance(result, LogprobEntry):
                    answer.prompt_logprobs.append(result)
                elif answer.error is None:
                    answer.error = result

    def _clean(self, spans: list[Span]) -> None:
        """Zero blocks that are begun anew and may hold what is not finite, from a sequence that failed.

        Attention masks the unwritten rest of a sequence's last block, but a masked NaN is still a NaN.
        """
        dirty = sorted(self._begun(spans) & self._tainted)
        if dirty:
            self._cache.index_fill_(1, to_device(np.array(dirty), self._model.device), 0.0)
            self._tainted.difference_update(dirty)

    def _begun(self, spans: list[Span]) -> set[int]:
        """Blocks whose first token is among the spans'."""
        begun: set[int] = set()
        for span in spans:
            first = -(-span.start // self.block_size)
            last = -(-(span.start + span.count) // self.block_size)
            begun.update(span.sequence.block_table[first:last])
        return begun


def _some(rows: Ints | None, places: list[int], count: int) -> Ints | None:
    """Of `count` rows of a pass, None if they are all of it, those at some places; in the same form."""
    if len(places) == count:
        return rows
    return np.array(places) if rows is None else rows[places]


def _scored(spans: list[Span], order: list[int]) -> Iterator[tuple[int, int, int]]:
    """Row of the pass, index of the span and id of the token behind, for each scored position.

    `order` is that of the spans' rows.
    """
    first = 0
    for index in order:
        span = spans[index]
        for position in span.scored:
            yield first + position - span.start, index, span.sequence.tokens[position + 1]
        first += span.count
