"""Batch sizes for which decodes are recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def capture_sizes(max_num_seqs: int, asked: Sequence[int] | None = None) -> list[int]:
    """Ascending: 1, 2, 4, then steps of 8 up to 256 and of 16 behind, as in vLLM; and the largest batch that there is.

    Args:
        max_num_seqs: most sequences in a batch; larger sizes are left out.
        asked: sizes in place of the usual ones; larger batches than these run without being recorded.
    """
    if asked is not None:
        return sorted({size for size in asked if size <= max_num_seqs})
    usual = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16)]
    return sorted({*(size for size in usual if size <= max_num_seqs), max_num_seqs})


def padded_size(sizes: Sequence[int], rows: int) -> int | None:
    """The least of ascending sizes that is no less than the rows; None where there is none."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None
