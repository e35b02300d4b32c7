"""Choosing the next token of each row: vectorised over the batch, and a row pays only for what it asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from engine.logit_edits import LogitEdits, edits_logits
from engine.plan import Sampled
from engine.request import LogprobEntry
from engine.sequence import Sequence
from kernels.ops import Ops
from kernels.reference.sampling import uniforms
from shared.errors import EngineError, InvalidRequestError, RopewayError

#: What a token of probability zero is given, so that no infinity reaches JSON.
LOGPROB_FLOOR = -9999.0

_FLOAT32_MAX = torch.finfo(torch.float32).max


def _draws(sequence: Sequence, maximum: float) -> bool:
    """Whether a row is drawn: not if it is greedy, nor if its temperature would take its logits out of their range."""
    return not sequence.params.greedy and abs(maximum) / sequence.params.temperature < _FLOAT32_MAX


class Sampler:
    """Samples one token per row: edits of the logits (see `LogitEdits`), temperature, min-p, top-k, top-p, draw.

    A random number is a function of (seed, choice index, output position), so a token does not depend on the batch.
    """

    def __init__(self, ops: Ops, encode: Callable[[str], list[int]]) -> None:
        """`encode` gives the token ids of a text, without special tokens; it is asked for bad words alone."""
        self._ops = ops
        self._encode = lru_cache(maxsize=1024)(encode)
        self._edits: dict[Sequence, LogitEdits] = {}

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """The next token of each sequence.

        Args:
            logits: [rows, vocab]; not changed.
            sequences: one per row.

        Returns:
            One per row. A row whose logits are not finite, or that has no token left to choose, has its own error.
        """
        best, chosen = logits.max(-1)
        tokens, maxima = chosen.tolist(), best.tolist()
        errors: dict[int, RopewayError] = {
            row: EngineError("the model's logits are not finite")
            for row, x in enumerate(maxima)
            if not math.isfinite(x)
        }
        edited_rows = [row for row, s in enumerate(sequences) if edits_logits(s) and row not in errors]
        edited = self._edit(logits, edited_rows, sequences)
        if edited is not None:
            best, chosen = edited.max(-1)
            for row, token, maximum in zip(edited_rows, chosen.tolist(), best.tolist(), strict=True):
                tokens[row], maxima[row] = token, maximum
                if maximum == float("-inf"):
                    errors[row] = InvalidRequestError("the request's options leave no token to choose")
                elif not math.isfinite(maximum):
                    errors[row] = InvalidRequestError("the request's options make logits that are not finite")
        drawn = [row for row, s in enumerate(sequences) if row not in errors and _draws(s, maxima[row])]
        if drawn:
            self._draw(logits, edited, edited_rows, drawn, sequences, maxima, tokens)
        entries = self._logprobs(logits, sequences, tokens, errors)
        return [
            Sampled(-1, error=errors[row]) if row in errors else Sampled(token, logprob=entries.get(row))
            for row, token in enumerate(tokens)
        ]

    def _edit(self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> torch.Tensor | None:
        """[rows, vocab] float32: the logits of these rows after their edits; None if there are no such rows."""
        # What belongs to sequences that are gone, or pause, goes with the old mapping.
        old, self._edits = self._edits, {}
        if not rows:
            return None
        states: list[LogitEdits] = []
        for row in rows:
            sequence = sequences[row]
            state = old.get(sequence) or LogitEdits(sequence, self._encode, logits.device)
            self._edits[sequence] = state
            states.append(state)
        values = logits.index_select(0, torch.tensor(rows, device=logits.device)).float()
        for row, state in enumerate(states):
            state.apply(values[row])
        penalised = [(row, state) for row, state in enumerate(states) if state.penalised]
        if penalised:
            self._penalise(values, penalised)
        return values

    def _penalise(self, values: torch.Tensor, rows: list[tuple[int, LogitEdits]]) -> None:
        tokens: list[int] = []
        counts: list[int] = []
        sizes: list[int] = []
        for _, state in rows:
            occurrences = state.occurrences()
            tokens += occurrences.keys()
            counts += occurrences.values()
            sizes.append(len(occurrences))
        device = values.device
        repeats = torch.tensor(sizes, device=device)
        params = [state.sequence.params for _, state in rows]

        def spread(numbers: list[float]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.float32, device=device).repeat_interleave(repeats)

        self._ops.apply_penalties(
            values,
            torch.tensor([row for row, _ in rows], device=device).repeat_interleave(repeats),
            torch.tensor(tokens, device=device),
            torch.tensor(counts, dtype=torch.float32, device=device),
            spread([p.presence_penalty for p in params]),
            spread([p.frequency_penalty for p in params]),
            spread([p.repetition_penalty for p in params]),
        )

    def _draw(
        self,
        logits: torch.Tensor,
        edited: torch.Tensor | None,
        edited_rows: list[int],
        drawn: list[int],
        sequences: list[Sequence],
        maxima: list[float],
        tokens: list[int],
    ) -> None:
        """Replace the arg-max of the drawn rows by a draw."""
        device, vocab = logits.device, logits.shape[1]
        values = logits.index_select(0, torch.tensor(drawn, device=device)).float()
        place = {row: index for index, row in enumerate(drawn)}
        both = [(index, place[row]) for index, row in enumerate(edited_rows) if row in place]
        if edited is not None and both:
            source, target = torch.tensor(both, device=device).unbind(1)
            values.index_copy_(0, target, edited.index_select(0, source))
        chosen = [sequences[row] for row in drawn]
        params = [sequence.params for sequence in chosen]
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        values.div_(temperature.unsqueeze(1))
        best = torch.tensor([maxima[row] for row in drawn], dtype=torch.float32, device=device).div_(temperature)
        threshold = self._ops.keep_threshold(
            values,
            best,
            [p.top_k if 0 < p.top_k < vocab else vocab for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        )
        uniform = uniforms([s.seed for s in chosen], [s.index for s in chosen], [s.output_len for s in chosen])
        picked = self._ops.draw(values, best, threshold, torch.from_numpy(uniform).to(device))
        # Where the filters leave the maximum alone, a tie is broken as greedy sampling breaks it.
        alone = (threshold >= best).tolist()
        for row, token, single in zip(drawn, picked.tolist(), alone, strict=True):
            if not single:
                tokens[row] = token

    def _logprobs(
        self, logits: torch.Tensor, sequences: list[Sequence], tokens: list[int], errors: dict[int, RopewayError]
    ) -> dict[int, LogprobEntry]:
        """Entries of the rows that ask, from the raw logits."""
        wanted = [(row, s.params.logprobs) for row, s in enumerate(sequences) if row not in errors]
        asked = [(row, count) for row, count in wanted if count is not None]
        if not asked:
            return {}
        device = logits.device
        values = logits.index_select(0, torch.tensor([row for row, _ in asked], device=device)).float()
        logprobs = values.log_softmax(-1).clamp_(min=LOGPROB_FLOOR)
        token = torch.tensor([[tokens[row]] for row, _ in asked], device=device)
        ranks = (values > values.gather(1, token)).sum(-1).add_(1).tolist()
        own = logprobs.gather(1, token).squeeze(1).tolist()
        most = min(max(count for _, count in asked), logits.shape[1])
        top_values, top_ids = (x.tolist() for x in logprobs.topk(most, dim=-1))
        return {
            row: LogprobEntry(
                token_id=tokens[row],
                logprob=own[i],
                rank=ranks[i],
                top=[(top_ids[i][k], top_values[i][k], k + 1, b"") for k in range(min(count, most))],
            )
            for i, (row, count) in enumerate(asked)
        }
