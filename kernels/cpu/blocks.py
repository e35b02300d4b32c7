"""Looking only at those blocks of logits that matter: their maxima tell which."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.blocked import BLOCK, BlockedLogits

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def pairs(marked: Bools) -> tuple[Ints, Ints]:
    """Row and column of all that is marked in a matrix, in order."""
    return np.divmod(np.flatnonzero(marked), marked.shape[1])


def take(x: BlockedLogits, rows: Ints, blocks: Ints) -> torch.Tensor:
    """[n, BLOCK], a copy: the blocks of these [n] numbers, each of its row."""
    return x.values.view(-1, BLOCK).index_select(0, torch.from_numpy(rows * x.peaks.shape[1] + blocks))
