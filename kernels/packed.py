"""Weights in a backend's own layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as `pack` has laid it out.

    Attributes:
        data: [bytes] uint8, contiguous.
        rows: of the weight.
        columns: of the weight.
        dtype: of the weight.
    """

    data: torch.Tensor
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight: rows and columns."""
        return self.rows, self.columns


#: A weight as layers take it: [rows, columns], or what `pack` has made of that.
Weight = torch.Tensor | Packed
