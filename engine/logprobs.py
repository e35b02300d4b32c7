"""Log probabilities of chosen tokens and of prompts' tokens, from the model's own logits."""

from __future__ import annotations

import math

import torch

from engine.request import LogprobEntry
from kernels.blocked import BlockedLogits
from kernels.ops import Ops
from shared.errors import EngineError

#: What a token of probability zero is given, so that no infinity reaches JSON.
LOGPROB_FLOOR = -9999.0


def not_finite() -> EngineError:
    """The error of a row whose logits are not finite."""
    return EngineError("the model's logits are not finite")


def score(
    ops: Ops, logits: torch.Tensor | BlockedLogits, tokens: list[int], counts: list[int]
) -> list[LogprobEntry | EngineError]:
    """`logprob_entries` of [rows, vocab] logits in any dtype; a row whose logits are not finite has an error."""
    x = BlockedLogits.of(logits)
    answers: list[LogprobEntry | EngineError] = [not_finite() for _ in tokens]
    rows = [row for row, best in enumerate(x.best.tolist()) if math.isfinite(best)]
    if not rows:
        return answers
    entries = logprob_entries(ops, x.select(rows), [tokens[row] for row in rows], [counts[row] for row in rows])
    for row, entry in zip(rows, entries, strict=True):
        answers[row] = entry
    return answers


def logprob_entries(ops: Ops, x: BlockedLogits, tokens: list[int], counts: list[int]) -> list[LogprobEntry]:
    """One entry per row.

    Args:
        ops: kernels.
        x: logits; the rows' maxima are finite.
        tokens: of each row, the one that the entry is for.
        counts: how many of the row's best tokens the entry names; no more than there are.
    """
    own = x.values.gather(1, torch.tensor(tokens, device=x.values.device).unsqueeze(1)).squeeze(1)
    ranks = ops.count_above(x, own).add_(1).tolist()
    norm = ops.log_sum_exp(x)
    most = min(max(counts), x.vocab)
    ids: list[list[int]] = [[]] * len(tokens)
    values: list[list[float]] = [[]] * len(tokens)
    if most:
        largest, found = ops.largest(x, most)
        ids, values = found.tolist(), _logprobs(largest, norm.unsqueeze(1)).tolist()
    return [
        LogprobEntry(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=[(ids[row][k], values[row][k], k + 1, b"") for k in range(min(counts[row], most))],
        )
        for row, (token, logprob, rank) in enumerate(zip(tokens, _logprobs(own, norm).tolist(), ranks, strict=True))
    ]


def _logprobs(logits: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    # Rounding may leave a certain token a hair above 0.
    return (logits.double() - norm).clamp_(LOGPROB_FLOOR, 0.0)
