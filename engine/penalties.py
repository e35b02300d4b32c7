"""Presence, frequency and repetition penalties over a batch whose sequences grow by a token a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.sequence import Sequence
from kernels.ops import Ops


def has_penalties(sequence: Sequence) -> bool:
    """Whether any penalty is set."""
    params = sequence.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class Occurrences:
    """Which tokens a sequence holds, each once, and how often they are in its output (0: in the prompt alone)."""

    __slots__ = ("_counts", "_places", "_size", "_tokens", "_until", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        prompt = np.unique(np.array(sequence.tokens[: sequence.prompt_len], dtype=np.int64))
        self._size, self._until = len(prompt), sequence.prompt_len
        room = np.zeros(max(64, len(prompt)), dtype=np.int64)
        self._tokens: npt.NDArray[np.int64] = np.concatenate((prompt, room))
        self._counts: npt.NDArray[np.float32] = np.zeros(len(self._tokens), dtype=np.float32)
        self._places = {token: place for place, token in enumerate(prompt.tolist())}

    def update(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Tokens and counts of the sequence as it is now; views that the next call may change."""
        tokens = self.sequence.tokens
        for token in tokens[self._until :]:
            place = self._places.setdefault(token, self._size)
            if place == self._size:
                self._append(token)
            self._counts[place] += 1.0
        self._until = len(tokens)
        return self._tokens[: self._size], self._counts[: self._size]

    def _append(self, token: int) -> None:
        if self._size == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._tokens[self._size] = token
        self._size += 1


class BatchPenalties:
    """The penalties of some rows of a batch."""

    def __init__(self, rows: list[tuple[int, Occurrences]]) -> None:
        """`rows` in what `apply` is given, each with its sequence's occurrences."""
        self._rows = np.array([row for row, _ in rows], dtype=np.int64)
        self._occurrences = [each for _, each in rows]
        params = [each.sequence.params for each in self._occurrences]
        self._presence = np.array([p.presence_penalty for p in params], dtype=np.float32)
        self._frequency = np.array([p.frequency_penalty for p in params], dtype=np.float32)
        self._repetition = np.array([p.repetition_penalty for p in params], dtype=np.float32)

    def apply(self, ops: Ops, logits: torch.Tensor) -> None:
        """Penalise what has occurred so far, in place; logits are [rows, width] float32, contiguous."""
        if not self._occurrences:
            return
        tokens, counts = zip(*(each.update() for each in self._occurrences), strict=True)
        sizes = [len(each) for each in tokens]
        index = np.concatenate(tokens) + np.repeat(self._rows * logits.shape[1], sizes)
        penalties = (np.repeat(each, sizes) for each in (self._presence, self._frequency, self._repetition))
        arrays = (torch.from_numpy(each).to(logits.device) for each in (index, np.concatenate(counts), *penalties))
        ops.apply_penalties(logits, *arrays)
