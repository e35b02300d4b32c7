"""One choice of a request as the engine keeps it: tokens, blocks, how far it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.sampling import SamplingParams


class SequenceState(Enum):
    """Where a sequence is. It is in exactly one state."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one choice. The scheduler and the engine write it, the runner reads it.

    Attributes:
        request_id: of the request that it belongs to.
        index: choice index, from 0.
        params: the request's.
        seed: 64-bit key of its random numbers, which are a function of (seed, index, output position) alone.
        tokens: prompt, then output.
        prompt_len: tokens that are prompt.
        block_table: block ids in order of position.
        computed: tokens whose keys and values are in the cache, or will be by passes that are under way.
        landed: of those, what no pass under way is still to write.
        ahead: tokens that passes under way will give it.
        max_len: length at which it ends with `length`: prompt plus max_tokens, at most the context.
        eos_token_ids: ids that end it, unless `ignore_eos`.
        arrival: order of arrival within the engine; unique.
        preemptions: how often it gave its blocks back.
        adapter_slot: slot of its adapter on the device while it runs; -1 for the base model.
        block_keys: prefix-cache keys of its first full blocks, as far as they were needed. They depend on tokens,
            adapter and salt alone, so they outlive a preemption.
        hit_tokens: known tokens that the prefix cache had at its first admission; None before.
        bypassed: admissions of others past it since it began to wait.
        siblings: all choices of its request, itself included, where there are several.
        scores: whether the log probabilities of the prompt are taken from its passes; true for one choice of a request.
        scored: of the positions that give them, how many are done.
    """

    request_id: str
    index: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 1
    arrival: int = 0
    adapter: str | None = None
    cache_salt: str | None = None
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    computed: int = 0
    landed: int = 0
    ahead: int = 0
    preemptions: int = 0
    adapter_slot: int = -1
    block_keys: list[bytes] = field(default_factory=list)
    hit_tokens: int | None = None
    bypassed: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    scores: bool = False
    scored: int = 0

    @property
    def output_len(self) -> int:
        """Tokens generated so far, resumed ones included: the position of the next random number."""
        return len(self.tokens) - self.prompt_len

    @property
    def length(self) -> int:
        """Tokens, with those that passes under way will give."""
        return len(self.tokens) + self.ahead

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet; 1 while decoding."""
        return len(self.tokens) + self.ahead - self.computed

    @property
    def ends(self) -> bool:
        """Whether the tokens under way take it to its greatest length: nothing more is computed for it."""
        return self.ahead > 0 and self.length >= self.max_len

    @property
    def scoring(self) -> bool:
        """Whether log probabilities of the prompt are still to be taken: then all of it must pass through the model."""
        return self.scores and self.scored < self.prompt_len - 1
