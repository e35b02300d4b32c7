"""What a request's options change in its logits before anything is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.sequence import Sequence


def _penalised(sequence: Sequence) -> bool:
    params = sequence.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def edits_logits(sequence: Sequence) -> bool:
    """Whether the next token's logits need any edit at all."""
    params = sequence.params
    return bool(
        params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or sequence.output_len < params.min_tokens
        or _penalised(sequence)
    )


class LogitEdits:
    """The edits of one sequence, prepared once. In this order, as in vLLM: allowed ids, bad words, min tokens, logit
    bias; penalties come after, for all rows at once.

    Attributes:
        sequence: whose they are.
        penalised: whether any penalty is set.
    """

    def __init__(self, sequence: Sequence, encode: Callable[[str], list[int]], device: torch.device) -> None:
        params = sequence.params
        self.sequence = sequence
        self.penalised = _penalised(sequence)
        self._counts: dict[int, int] = {}
        self._counted = 0
        self._allowed = _ids(params.allowed_token_ids, device)
        self._bad_words = [ids for word in params.bad_words or [] for ids in _spellings(word, encode)]
        ends = sorted(sequence.eos_token_ids.union(params.stop_token_ids or ()))
        self._ends = _ids(ends, device)
        bias = dict(sorted((params.logit_bias or {}).items()))
        self._biased = _ids(list(bias), device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def apply(self, logits: torch.Tensor) -> None:
        """Edit [vocab] float32 in place, all but penalties."""
        params, sequence = self.sequence.params, self.sequence
        if self._allowed is not None:
            kept = logits.index_select(0, self._allowed)
            logits.fill_(float("-inf")).index_copy_(0, self._allowed, kept)
        output = sequence.tokens[sequence.prompt_len :] if self._bad_words else []
        for *prefix, last in self._bad_words:
            if not prefix or output[-len(prefix) :] == prefix:
                logits[last] = float("-inf")
        if self._ends is not None and sequence.output_len < params.min_tokens:
            logits.index_fill_(0, self._ends, float("-inf"))
        if self._biased is not None:
            logits.index_add_(0, self._biased, self._bias)

    def occurrences(self) -> dict[int, int]:
        """Tokens of prompt and output with their counts in the output (0: in the prompt alone)."""
        sequence = self.sequence
        for position in range(self._counted, len(sequence.tokens)):
            token = sequence.tokens[position]
            self._counts[token] = self._counts.get(token, 0) + (position >= sequence.prompt_len)
        self._counted = len(sequence.tokens)
        return self._counts


def _ids(ids: list[int] | None, device: torch.device) -> torch.Tensor | None:
    return torch.tensor(sorted(set(ids)), device=device) if ids else None


def _spellings(word: str, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of a bad word at the start of a text, and behind a space where that is as long and another token."""
    plain, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
    found = [plain] if plain else []
    if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
        found.append(spaced)
    return found
