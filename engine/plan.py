"""What the scheduler tells the runner for one step, and what the runner answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.request import LogprobEntry
from engine.sequence import Sequence, SequenceState
from shared.errors import RopewayError

if TYPE_CHECKING:
    from engine.adapters.weights import Adapter


@dataclass(slots=True)
class Span:
    """Tokens of one sequence that this step computes: `tokens[start : start + count]`.

    The token at `start` may be one that the pass before is still to give; the span is that token alone then.

    `sample` is set where the last of them is the sequence's last known token, so that its logits give the next one.
    The blocks of positions 0 to `start + count - 1` are in the sequence's block table. `scored` are positions of the
    span whose logits give the log probability of the token behind them, which is one of the prompt's.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    scored: range = range(0)


@dataclass(slots=True)
class StepPlan:
    """One forward pass: decodes first (`decodes` of them, one token each), then prefill chunks.

    `copies` are (source, destination) block ids to copy before anything is written, `fills` are (slot, identity) of
    adapters to bring to the device before.
    """

    spans: list[Span] = field(default_factory=list)
    decodes: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    fills: list[tuple[int, str]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens in the pass."""
        return sum(span.count for span in self.spans)

    def still_running(self) -> StepPlan:
        """Without the spans of sequences that do not run any more, and without fills."""
        running = [span.sequence.state is SequenceState.RUNNING for span in self.spans]
        spans = [span for span, runs in zip(self.spans, running, strict=True) if runs]
        return StepPlan(spans, sum(running[: self.decodes]), self.copies)


@dataclass(slots=True)
class Sampled:
    """What one span gave, or why it failed.

    Attributes:
        token_id: the next token; None where the span does not sample.
        logprob: where the sequence's params ask for it. Token bytes are filled in by the engine, here and below.
        prompt_logprobs: one entry per position of the span's `scored`.
    """

    token_id: int | None
    logprob: LogprobEntry | None = None
    error: RopewayError | None = None
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)


class Runner(Protocol):
    """Owns weights, KV cache and device; knows no policy."""

    num_blocks: int
    block_size: int
    vocab_size: int

    def fill_slot(self, slot: int, adapter: Adapter) -> None:
        """Bring an adapter to the device, over what the slot held; `Sequence.adapter_slot` says who uses it."""

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """Run one pass. One answer per span, None where neither `sample` nor `scored` is set.

        A row whose logits are not finite has its own `error` (EngineError); the other rows are unaffected. Writing the
        same positions twice gives the same cache, so a failed pass may be run again in parts.

        Raises:
            DeviceLostError: it is of no use to run anything again.
        """


class Pending(Protocol):
    """A pass that was launched."""

    def result(self) -> list[Sampled | None]:
        """Wait for it; what `Runner.execute` answers, but that log probabilities are not told.

        What it raises is the failure of the pass as a whole, and of all that were launched behind it.
        """


class Launcher(Protocol):
    """A runner whose passes need not be waited for before the next one begins."""

    def launches(self, plan: StepPlan) -> bool:
        """Whether the pass can be launched: nothing in it needs the host before it ends."""

    def launch(self, plan: StepPlan) -> Pending:
        """Begin a pass behind the last one launched, whose tokens it may take: see `Span`."""
