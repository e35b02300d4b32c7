"""Logits as sampling works on them: float32, cut into blocks of tokens whose maxima are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

#: Tokens in a block. Small blocks have many maxima to look through, large ones many tokens behind each maximum: of 32,
#: 64, 128 and 256, 64 takes the least time for the 50 largest of 49152.
BLOCK = 64


@dataclass(frozen=True, slots=True)
class BlockedLogits:
    """Some rows of logits; what they share memory with must not change.

    Attributes:
        values: [rows, width] float32, contiguous; `width` is a multiple of `BLOCK`, with -inf behind the vocabulary.
        peaks: [rows, width / BLOCK]: the maximum of each block, NaN where it holds one.
        best: [rows]: the maximum of each row, NaN where it holds one.
        vocab: tokens that there are.
    """

    values: torch.Tensor
    peaks: torch.Tensor
    best: torch.Tensor
    vocab: int

    @classmethod
    def of(cls, logits: torch.Tensor | BlockedLogits) -> BlockedLogits:
        """[rows, vocab] of any floating dtype; shares memory with `logits` where nothing has to be converted."""
        if isinstance(logits, BlockedLogits):
            return logits
        vocab = logits.shape[1]
        values = logits.float()
        if vocab % BLOCK:
            values = F.pad(values, (0, -vocab % BLOCK), value=float("-inf"))
        return cls.of_padded(values.contiguous(), vocab)

    @classmethod
    def of_padded(cls, values: torch.Tensor, vocab: int) -> BlockedLogits:
        """Of what is as `values` is to be; shares memory with it."""
        peaks = values.view(len(values), -1, BLOCK).amax(-1)
        return cls(values, peaks, peaks.amax(-1), vocab)

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device | None = None) -> BlockedLogits:
        """Memory for so many rows, to be filled in."""
        blocks = -(-vocab // BLOCK)
        values, peaks, best = (
            torch.empty(shape, dtype=torch.float32, device=device)
            for shape in ((rows, blocks * BLOCK), (rows, blocks), rows)
        )
        return cls(values, peaks, best, vocab)

    @property
    def blocks(self) -> torch.Tensor:
        """[rows, blocks, BLOCK]: the same memory as `values`."""
        return self.values.view(len(self.values), -1, BLOCK)

    def select(self, rows: list[int]) -> BlockedLogits:
        """Some rows, ascending, each once. Shares memory with this one if that is all of them."""
        if len(rows) == len(self.values):
            return self
        return self.take(torch.tensor(rows, dtype=torch.int64, device=self.values.device))

    def take(self, index: torch.Tensor) -> BlockedLogits:
        """The rows of [rows] int64, copied."""
        values, peaks, best = (tensor.index_select(0, index) for tensor in (self.values, self.peaks, self.best))
        return BlockedLogits(values, peaks, best, self.vocab)
