"""What the scheduler tells the runner for one step, and what the runner answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.request import LogprobEntry
from engine.sequence import Sequence
from shared.errors import RopewayError


@dataclass(slots=True)
class Span:
    """Tokens of one sequence that this step computes: `tokens[start : start + count]`.

    `sample` is set where the last of them is the sequence's last known token, so that its logits give the next one.
    The blocks of positions 0 to `start + count - 1` are in the sequence's block table.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    """One forward pass: decodes first (`decodes` of them, one token each), then prefill chunks.

    `copies` are (source, destination) block ids to copy before anything is written.
    """

    spans: list[Span] = field(default_factory=list)
    decodes: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens in the pass."""
        return sum(span.count for span in self.spans)


@dataclass(slots=True)
class Sampled:
    """The next token of one span, or why there is none.

    `logprob` is set where the sequence's params ask for it; token bytes are filled in by the engine.
    """

    token_id: int
    logprob: LogprobEntry | None = None
    error: RopewayError | None = None


class Runner(Protocol):
    """Owns weights, KV cache and device; knows no policy."""

    num_blocks: int
    block_size: int
    vocab_size: int

    def has_adapter(self, adapter: str) -> bool:
        """Whether sequences of this adapter can be computed."""

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """Run one pass. One answer per span, None where `sample` is not set.

        A row whose logits are not finite has its own `error` (EngineError); the other rows are unaffected. Writing the
        same positions twice gives the same cache, so a failed pass may be run again in parts.
        """
