"""A forward pass in plain numbers, for kernels that run where the host's memory is: to make tensors would cost more."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class HostPass:
    """Tokens of some sequences, one sequence after the other.

    Attributes:
        tokens, positions: of each row.
        slots: where the KV cache takes each row, `block_id * block_size + offset`.
        counts: rows of each sequence, the last of its keys.
        lengths: keys of each sequence.
        starts: where in `blocks` the block table of each sequence begins.
        blocks: block tables end to end, as far as they hold keys.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
