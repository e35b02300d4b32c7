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


def score(ops: Ops, logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[LogprobEntry | EngineError]:
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
    ranks = ops.count_above(x, own).tolist()
    # Sums are taken for all rows at once, logarithms one by one: so they are the same for each number of rows.
    norms = [best + math.log(total) for best, total in zip(x.best.tolist(), ops.sum_exp(x).tolist(), strict=True)]
    most = min(max(counts), x.vocab)
    largest, ids = (part.tolist() for part in ops.largest(x, most)) if most else ([[]] * len(tokens),) * 2
    return [
        LogprobEntry(
            token_id=token,
            logprob=_logprob(logit, norm),
            rank=above + 1,
            top=[(ids[row][k], _logprob(largest[row][k], norm), k + 1, b"") for k in range(min(counts[row], most))],
        )
        for row, (token, logit, norm, above) in enumerate(zip(tokens, own.tolist(), norms, ranks, strict=True))
    ]


def _logprob(logit: float, norm: float) -> float:
    # Rounding may leave a certain token a hair above 0.
    return max(min(logit - norm, 0.0), LOGPROB_FLOOR)
