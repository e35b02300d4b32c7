"""Sampling on the device: from logits to token ids without the host seeing either."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.device.staging import Staging
from engine.logit_edits import edits_logits
from engine.plan import Span
from engine.sampler import LARGEST
from engine.sequence import Sequence
from kernels.blocked import BlockedLogits
from kernels.ops import Ops
from kernels.reference.sampling import pack_counters, pack_filters

#: In the place of a token: the row's logits are not finite.
NOT_FINITE = -1


def needs_host(sequence: Sequence) -> bool:
    """Whether the host takes part in the choice of the next token: it edits logits, or tells log probabilities."""
    return sequence.params.logprobs is not None or edits_logits(sequence)


@dataclass(frozen=True, slots=True)
class Draws:
    """What is drawn of a pass's rows that sample; tensors are there once the staging has sent them.

    Attributes:
        rows: [drawn] int64, which rows; None: all of them.
        counters: [3, drawn] int64, see `uniforms_packed`.
        temperature: [drawn] float64.
        filters: [3, drawn] float64, see `draw_packed`.
    """

    rows: torch.Tensor | None
    counters: torch.Tensor
    temperature: torch.Tensor
    filters: torch.Tensor


class DeviceSampler:
    """Chooses tokens as `engine.sampler.Sampler` does, for rows that need nothing of the host."""

    def __init__(self, ops: Ops, vocab: int) -> None:
        self._ops, self._vocab = ops, vocab

    def stage(self, spans: list[Span], staging: Staging) -> Draws | None:
        """Put what is needed to draw for spans that sample; None where all are greedy."""
        drawn = [row for row, span in enumerate(spans) if not span.sequence.params.greedy]
        if not drawn:
            return None
        params = [spans[row].sequence.params for row in drawn]
        # Not `output_len`: tokens of passes under way are not among the sequence's yet.
        positions = [spans[row].start + spans[row].count - spans[row].sequence.prompt_len for row in drawn]
        seeds, choices = zip(*((spans[row].sequence.seed, spans[row].sequence.index) for row in drawn), strict=True)
        filters = pack_filters(
            [each.top_k for each in params], [each.top_p for each in params], [each.min_p for each in params],
            self._vocab,
        )  # fmt: skip
        return Draws(
            None if len(drawn) == len(spans) else staging.put(np.array(drawn, dtype=np.int64)),
            staging.put(pack_counters(seeds, choices, positions)),
            staging.put(np.array([each.temperature for each in params], dtype=np.float64)),
            staging.put(filters),
        )

    def sample(self, x: BlockedLogits, draws: Draws | None) -> torch.Tensor:
        """[rows] int64 token ids, `NOT_FINITE` where the logits are not."""
        tokens: torch.Tensor = self._ops.argmax(x)
        if draws is not None:
            some = x if draws.rows is None else x.take(draws.rows)
            uniform = self._ops.uniforms_packed(draws.counters)
            drawn, _ = self._ops.draw_packed(some, draws.temperature.float(), draws.filters, uniform)
            greedy = tokens if draws.rows is None else tokens.index_select(0, draws.rows)
            in_range = some.best.double().abs() / draws.temperature < LARGEST
            drawn = torch.where(in_range, drawn, greedy)
            tokens = drawn if draws.rows is None else tokens.index_copy(0, draws.rows, drawn)
        return torch.where(torch.isfinite(x.best), tokens, NOT_FINITE)
