"""What requests' options change in their logits before anything is chosen."""

from __future__ import annotations

from collections.abc import Callable

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
        banned: ids that must never be chosen.
        occurrences: for the penalties; None if there are none.
    """

    def __init__(self, sequence: Sequence, encode: Callable[[str], list[int]]) -> None:
        self.sequence = sequence
        self.occurrences = Occurrences(sequence) if has_penalties(sequence) else None
        self._ends = list(sequence.eos_token_ids.union(sequence.params.stop_token_ids or ()))
        spellings = [ids for word in sequence.params.bad_words or [] for ids in _spellings(word, encode)]
        self.banned = [ids[0] for ids in spellings if len(ids) == 1]
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
        params = [(row, each.sequence.params) for row, each in zip(rows, edits, strict=True)]
        self._outside = [(row, self._mask(p.allowed_token_ids)) for row, p in params if p.allowed_token_ids is not None]
        bias = {row * width + token: value for row, p in params for token, value in (p.logit_bias or {}).items()}
        self._biased = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        banned = [row * width + token for row, each in zip(rows, edits, strict=True) for token in each.banned]
        self._banned = torch.tensor(banned, dtype=torch.int64, device=device)
        self._penalties = BatchPenalties(
            [(row, each.occurrences) for row, each in zip(rows, edits, strict=True) if each.occurrences is not None]
        )

    def _mask(self, allowed: list[int]) -> torch.Tensor:
        mask = torch.ones(self._width, dtype=torch.bool, device=self._device)
        return mask.index_fill_(0, torch.tensor(allowed, device=self._device), False)

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
