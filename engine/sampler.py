"""Choosing the next token of each row: vectorised over the batch, and a row pays only for what it asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from engine.logit_edits import BatchEdits, LogitEdits, edits_logits
from engine.logprobs import logprob_entries, not_finite
from engine.plan import Sampled
from engine.request import LogprobEntry
from engine.sequence import Sequence
from kernels.blocked import BlockedLogits
from kernels.ops import Ops
from kernels.reference.sampling import DrawnRows
from shared.errors import InvalidRequestError, RopewayError

#: A temperature that makes the best logit larger than this is greedy; half, since it is rounded to a float32 itself.
LARGEST = torch.finfo(torch.float32).max / 2


def _draws(sequence: Sequence, maximum: float) -> bool:
    """Whether a row is drawn: not if it is greedy, nor if its temperature would take its logits out of their range."""
    return not sequence.params.greedy and abs(maximum) / sequence.params.temperature < LARGEST


def takes_argmax(sequence: Sequence) -> bool:
    """Whether the next token is the arg-max of the model's own logits, and nothing else is asked of them."""
    return sequence.params.greedy and sequence.params.logprobs is None and not edits_logits(sequence)


class Sampler:
    """Samples one token per row: edits of the logits (see `BatchEdits`), temperature, min-p, top-k, top-p, draw.

    A random number is a function of (seed, choice index, output position). A row's token and log probabilities depend,
    bit for bit, on that and on its own logits and options, neither on other rows nor on how many there are.
    """

    def __init__(self, ops: Ops, encode: Callable[[str], list[int]]) -> None:
        """`encode` gives the token ids of a text, without special tokens; it is asked for bad words alone."""
        self._ops = ops
        self._encode = lru_cache(maxsize=1024)(encode)
        self._edits: BatchEdits | None = None
        # Kept from step to step: large memory would go back to the system and be taken anew.
        self._room: BlockedLogits | None = None

    def sample(self, logits: torch.Tensor | BlockedLogits, sequences: list[Sequence]) -> list[Sampled]:
        """The next token of each sequence.

        Args:
            logits: [rows, vocab]; not changed.
            sequences: one per row.

        Returns:
            One per row. A row whose logits are not finite, or that has no token left to choose, has its own error.
        """
        raw = BlockedLogits.of(logits)
        maxima = raw.best.tolist()
        errors: dict[int, RopewayError] = {
            row: not_finite() for row, maximum in enumerate(maxima) if not math.isfinite(maximum)
        }
        # Where every row is drawn, or has an error, nobody asks for the arg-max.
        drawn = all(row in errors or _draws(s, maxima[row]) for row, s in enumerate(sequences))
        tokens = [-1] * len(sequences) if drawn else self._ops.argmax(raw).tolist()
        self._choose(raw, sequences, tokens, maxima, errors)
        entries = self._logprobs(raw, sequences, tokens, errors)
        return [
            Sampled(None, error=errors[row]) if row in errors else Sampled(token, logprob=entries.get(row))
            for row, token in enumerate(tokens)
        ]

    def rest(self) -> None:
        """No row of a step is edited: let go of what belongs to sequences of the last one."""
        self._edits = self._room = None

    def _choose(
        self,
        raw: BlockedLogits,
        sequences: list[Sequence],
        tokens: list[int],
        maxima: list[float],
        errors: dict[int, RopewayError],
    ) -> None:
        """Replace the arg-max of rows that are edited or drawn; tell the errors of those that cannot be."""
        edited = [row for row, s in enumerate(sequences) if row not in errors and edits_logits(s)]
        x, rows = raw, list(range(len(sequences)))
        if edited:
            drawn = [row for row, s in enumerate(sequences) if row not in errors and not s.params.greedy]
            rows = sorted({*edited, *drawn})
            x = self._edit(raw, rows, edited, sequences)
            for row, maximum in zip(rows, x.best.tolist(), strict=True):
                maxima[row] = maximum
                if maximum == float("-inf"):
                    errors[row] = InvalidRequestError("the request's options leave no token to choose")
                elif not math.isfinite(maximum):
                    errors[row] = InvalidRequestError("the request's options make logits that are not finite")
        else:
            self.rest()
        places = [place for place, row in enumerate(rows) if row not in errors and _draws(sequences[row], maxima[row])]
        if edited and len(places) < len(rows):
            for row, token in zip(rows, self._ops.argmax(x).tolist(), strict=True):
                tokens[row] = token
        if places:
            drawn = [rows[place] for place in places]
            for row, token in zip(drawn, self._draw(x, places, [sequences[row] for row in drawn]), strict=True):
                tokens[row] = token

    def _edit(self, raw: BlockedLogits, rows: list[int], edited: list[int], sequences: list[Sequence]) -> BlockedLogits:
        """Some rows' logits, of which some are edited."""
        room = self._room
        if room is None or len(room.values) != len(rows):
            room = self._room = BlockedLogits.empty(len(rows), raw.vocab, raw.values.device)
        self._ops.take_rows(raw, rows, room)
        place = {row: place for place, row in enumerate(rows)}
        edits = self._edits_of([sequences[row] for row in edited], [place[row] for row in edited], room.values)
        edits.apply(self._ops, room.values)
        self._ops.find_maxima(room)
        return room

    def _edits_of(self, sequences: list[Sequence], rows: list[int], values: torch.Tensor) -> BatchEdits:
        """The edits of these sequences, which are those of the last step as long as nobody comes or goes."""
        edits, width, device = self._edits, values.shape[1], values.device
        if edits is None or edits.rows != rows or edits.sequences != sequences:
            # What belongs to sequences that are gone, or pause, goes with the old edits.
            known = {} if edits is None else dict(zip(edits.sequences, edits.edits, strict=True))
            each = [known.get(one) or LogitEdits(one, self._encode, width, device) for one in sequences]
            edits = self._edits = BatchEdits(each, rows, width, device)
        return edits

    def _draw(self, x: BlockedLogits, rows: list[int], sequences: list[Sequence]) -> list[int]:
        """Tokens of some rows, one per sequence."""
        params = [sequence.params for sequence in sequences]
        drawn = DrawnRows(
            rows,
            [p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [s.seed for s in sequences],
            [s.index for s in sequences],
            [s.output_len for s in sequences],
        )
        tokens: list[int] = self._ops.draw_rows(x, drawn)
        return tokens

    def _logprobs(
        self,
        raw: BlockedLogits,
        sequences: list[Sequence],
        tokens: list[int],
        errors: dict[int, RopewayError],
    ) -> dict[int, LogprobEntry]:
        """Entries of the rows that ask, from the raw logits."""
        wanted = [(row, s.params.logprobs) for row, s in enumerate(sequences) if row not in errors]
        asked = {row: count for row, count in wanted if count is not None}
        if not asked:
            return {}
        rows = list(asked)
        entries = logprob_entries(self._ops, raw.select(rows), [tokens[row] for row in rows], list(asked.values()))
        return dict(zip(rows, entries, strict=True))
