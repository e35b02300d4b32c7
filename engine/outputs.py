"""What `LLM` gives back, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import FinishReason, LogprobEntry
from shared.errors import RopewayError


@dataclass(slots=True)
class Logprob:
    """Log probability of one candidate; `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    Attributes:
        index: which choice.
        text: without prompt and stop string.
        token_ids: all generated ids.
        cumulative_logprob: sum over the tokens; None where logprobs are not asked for.
        logprobs: per token the candidates by id, the token itself among them.
        finish_reason: `stop`, `length`, `error`; None only while unfinished.
        stop_reason: the stop string or id that ended it; None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add_logprobs(self, entries: list[LogprobEntry]) -> None:
        """Append the entries of new tokens."""
        if self.logprobs is None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        for entry in entries:
            self.logprobs.append(candidates(entry))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry.logprob


def candidates(entry: LogprobEntry) -> dict[int, Logprob]:
    """Those of one position by token id, the position's own token among them."""
    own = {entry.token_id: Logprob(entry.logprob, entry.rank, _text(entry.token))}
    return own | {token: Logprob(value, rank, _text(raw)) for token, value, rank, raw in entry.top}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """One request.

    Attributes:
        request_id: unique within the `LLM`.
        prompt: text, if it was given as text.
        prompt_token_ids: what the model saw, without what `truncate_prompt_tokens` cut off.
        outputs: one per choice, in order.
        finished: always true in what `LLM` returns.
        metrics: when things happened.
        prompt_logprobs: per token of the prompt the candidates by id, the token itself among them; None for the first
            token, and altogether where not asked for.
        num_cached_tokens: prompt tokens that the prefix cache had.
        error: why the request failed; its choices then end with `error`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: RopewayError | None = None
