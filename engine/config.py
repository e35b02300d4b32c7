"""Settings of the engine as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler may put into one step and into the KV cache.

    Attributes:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens in one forward pass; at least `max_num_seqs`, since every running sequence
            decodes one in each step.
        max_model_len: context in tokens, prompt and output.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        watermark: share of the pool that an admission leaves free while others run.
        lookahead: waiting sequences that are tried behind one that does not fit.
        max_bypasses: admissions past a waiting sequence after which nobody passes it any more.
        output_reserve: output tokens that `Engine.capacity` sets aside at most for each live sequence.

    Raises:
        ValueError: a value is out of bounds.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    lookahead: int = 8
    max_bypasses: int = 32
    output_reserve: int = 256

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
        if min(self.lookahead, self.max_bypasses, self.output_reserve) < 0:
            raise ValueError("lookahead, max_bypasses and output_reserve must not be negative")
