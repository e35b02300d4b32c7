"""What requests' options change in their logits before anything is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.penalties import BatchPenalties, Occurrences, has_penalties
from engine.sequence import Sequence
from kernels.ops import Ops

_MASKED = float("-inf")


def edits_logits(sequence: Sequence) -> bool:
    """Whether the next token's logits need any edit at all."""
    params = sequence.params
    return bool(
        params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or sequence.output_len < params.min_tokens
        or has_penalties(sequence)
    )


class LogitEdits:
    """The edits of one sequence, prepared once.

    Attributes:
        sequence: whose they are.
        outside: [width] bool: ids that are not allowed; None if all are.
        banned: ids that must never be chosen.
        biased, bias: ids, each once, and what is added to their logits.
        occurrences: for the penalties; None if there are none.
    """

    def __init__(
        self, sequence: Sequence, encode: Callable[[str], list[int]], width: int, device: torch.device
    ) -> None:
        """`width` is that of the logits, `encode` gives the ids of a text."""
        params = sequence.params
        self.sequence = sequence
        self.outside: torch.Tensor | None = None
        if params.allowed_token_ids is not None:
            self.outside = torch.ones(width, dtype=torch.bool, device=device)
            self.outside[torch.tensor(params.allowed_token_ids, device=device)] = False
        spellings = [ids for word in params.bad_words or [] for ids in _spellings(word, encode)]
        self.banned = np.array([ids[0] for ids in spellings if len(ids) == 1], dtype=np.int64)
        bias = params.logit_bias or {}
        self.biased = np.array(list(bias), dtype=np.int64)
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self.occurrences = Occurrences(sequence) if has_penalties(sequence) else None
        self._ends = list(sequence.eos_token_ids.union(params.stop_token_ids or ()))
        # Bad words of several tokens by their last but one, as (all but the last, the last).
        self._phrases: dict[int, list[tuple[list[int], int]]] = {}
        for *beginning, last in spellings:
            if beginning:
                self._phrases.setdefault(beginning[-1], []).append((beginning, last))

    def banned_now(self) -> list[int]:
        """Ids that the next token must not be, besides `banned`: ends before `min_tokens`, ends of bad words."""
        sequence, length = self.sequence, self.sequence.output_len
        ids = self._ends if length < sequence.params.min_tokens else []
        if self._phrases and length:
            tokens = sequence.tokens
            return ids + [
                last
                for beginning, last in self._phrases.get(tokens[-1], ())
                if len(beginning) <= length and tokens[-len(beginning) :] == beginning
            ]
        return ids


class BatchEdits:
    """The edits of some sequences, a row each, so that a step takes a few operations for all of them.

    In this order, as in vLLM: allowed ids, bad words, min tokens, logit bias, penalties.

    Attributes:
        edits, sequences: one each per row.
        rows: which these are in what `apply` is given.
    """

    def __init__(self, edits: list[LogitEdits], rows: list[int], width: int, device: torch.device) -> None:
        """Prepare for logits of [at least the greatest of `rows`, width]."""
        self.edits, self.rows = edits, rows
        self.sequences = [each.sequence for each in edits]
        self._width, self._device = width, device
        placed = list(zip(rows, edits, strict=True))
        self._outside = [(row, each.outside) for row, each in placed if each.outside is not None]
        self._banned = self._tensor([row * width + each.banned for row, each in placed])
        self._biased = self._tensor([row * width + each.biased for row, each in placed])
        self._bias = self._tensor([each.bias for each in edits])
        self._penalties = BatchPenalties(
            [(row, each.occurrences) for row, each in placed if each.occurrences is not None]
        )

    def _tensor(self, parts: list[npt.NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)

    def apply(self, ops: Ops, logits: torch.Tensor) -> None:
        """Edit float32 logits in place, for the next token of each sequence."""
        flat = logits.view(-1)
        for row, outside in self._outside:
            logits[row].masked_fill_(outside, _MASKED)
        now = [
            row * self._width + token
            for row, each in zip(self.rows, self.edits, strict=True)
            for token in each.banned_now()
        ]
        for banned in (self._banned, torch.tensor(now, dtype=torch.int64, device=self._device)):
            if len(banned):
                flat.index_fill_(0, banned, _MASKED)
        if len(self._biased):
            flat.index_add_(0, self._biased, self._bias)
        self._penalties.apply(ops, logits)


def _spellings(word: str, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of a bad word at the start of a text, and behind a space where that is as long and another token."""
    plain, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
    found = [plain] if plain else []
    if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
        found.append(spaced)
    return found
