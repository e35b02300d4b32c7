"""What callers give to an engine and get back: plain dataclasses, the same for `Engine` and `SimEngine`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shared.errors import RopewayError
from shared.sampling import SamplingParams

#: Priority of a class; smaller is served first.
PRIORITIES = {"high": 0, "normal": 1, "batch": 2}

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class LogprobEntry:
    """Log probability of a token (natural log, of the raw logits' softmax as in vLLM), rank from 1, and its bytes.

    `top` holds the position's candidates as `(token id, logprob, rank, bytes)`.
    """

    token_id: int
    logprob: float
    rank: int
    token: bytes = b""
    top: list[tuple[int, float, int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class ResumedChoice:
    """What was already published of a choice when its request is taken up by another engine.

    Attributes:
        index: which choice.
        token_ids: all published ids; they count as output, not as prompt.
        text: the text that was published; the engine's own detokenizing of `token_ids` begins with it, and the first
            delta's text starts right behind it.
        finish_reason: set if the choice had ended: nothing is generated for it, and no delta is emitted.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class EngineRequest:
    """One request.

    Attributes:
        id: unique among live requests.
        prompt_token_ids: never empty.
        params: `max_tokens` None means up to the context; a `seed` of None is drawn by the engine.
        priority: smaller first; see `PRIORITIES`.
        adapter: adapter identity (hash of content), None for the base model.
        adapter_name: what it is called, for logs; it may be empty.
        cache_salt: mixed into the prefix cache's keys.
        resume: choices that were under way elsewhere; empty for a fresh request.
        prompt_logprobs_done: entries of the prompt's log probabilities that were published elsewhere.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 1
    adapter: str | None = None
    adapter_name: str = ""
    cache_salt: str | None = None
    resume: list[ResumedChoice] = field(default_factory=list)
    prompt_logprobs_done: int = 0


@dataclass(slots=True)
class ChoiceDelta:
    """What one step adds to one choice.

    Attributes:
        index: which choice.
        offset: tokens of the choice before this delta (those of a resumed choice included).
        token_ids: new ids, at once, also where their text is held back.
        text: new text that is certain: no half characters, no possible stop string.
        logprobs: one per new id, or None where not asked for.
        finish_reason: set in the choice's last delta.
        stop_reason: the stop string or stop token id that ended it; None for EOS.
    """

    index: int
    offset: int
    token_ids: list[int]
    text: str
    logprobs: list[LogprobEntry] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestUsage:
    """Counts of a request. `completion_tokens` sums over choices, resumed tokens included."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class StepOutput:
    """What one step did for one request.

    Attributes:
        started: this step is the first to compute anything for the request.
        choices: deltas; a choice without news is absent.
        finished: the request is over and its blocks are free; usage is final.
        prompt_logprobs: new entries of the prompt, in order: the first of all is of its second token, since nothing is
            known of the first. All have come before any choice has a token.
        error: why it failed; then `finished` is set and no choice carries `stop` or `length` for it.
        blocks: most KV blocks it held at once; preemptions: how often it gave them back. Both so far.
    """

    request_id: str
    choices: list[ChoiceDelta] = field(default_factory=list)
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    started: bool = False
    finished: bool = False
    usage: RequestUsage = field(default_factory=RequestUsage)
    error: RopewayError | None = None
    blocks: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What can be admitted now: sequences, and tokens of KV cache (prompt plus output)."""

    sequences: int
    tokens: int


@dataclass(slots=True)
class AdapterStats:
    """Where adapters are, by identity. Counters rise for the engine's life.

    Attributes:
        slots: on the device; 0 where no adapters are served.
        resident: adapters in slots.
        in_memory: adapters in memory, in a slot or not.
        loading: adapters that are being fetched or read, or wait for room in memory.
        failed: why others could not be had, the last ones, until they can.
        failed_at: since when, in monotonic seconds.
        loads, load_failures: adapters that came into memory, and that could not.
        load_seconds: of the last loads, the newest last: from the first request for one until it was in memory.
        fills, evictions: adapters that were brought to a slot, and that left one.
        loading_requests: requests that wait for an adapter to be in memory.
        waiting_requests: those that wait for a slot or for blocks.
        running_requests: those in the batch.
    """

    slots: int = 0
    resident: list[str] = field(default_factory=list)
    in_memory: list[str] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    failed_at: dict[str, float] = field(default_factory=dict)
    loads: int = 0
    load_failures: int = 0
    load_seconds: list[float] = field(default_factory=list)
    fills: int = 0
    evictions: int = 0
    loading_requests: int = 0
    waiting_requests: int = 0
    running_requests: int = 0


@dataclass(slots=True)
class EngineStats:
    """A snapshot for metrics. Blocks: free + used + cached = total. Counters rise for the engine's life.

    `prefix_hit_rate` is that of the most recent requests, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_rate: float = 0.0
    preemptions: int = 0
    adapters: AdapterStats = field(default_factory=AdapterStats)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker writes on the pool's card.

    `tokenizer_json`, `chat_template` and `special_tokens` go to gateways as they are. `adapter_modules` are inputs and
    outputs of each module that an adapter may change, by name, and `max_lora_rank` is the largest rank; none and 0
    where no adapters are served.
    """

    name: str
    digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    kv_tokens: int
    dtype: str
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    adapter_modules: dict[str, tuple[int, int]] = field(default_factory=dict)
    max_lora_rank: int = 0


class DeviceLostError(Exception):
    """The device computes nothing more for this process, whatever it is asked: no request's fault, and all ends."""


class EngineProtocol(Protocol):
    """The engine as its callers see it. All calls come from one thread."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never be served: empty, too long for context or KV cache, ids out of range,
                or an id that is already live.
        """

    def step(self) -> list[StepOutput]:
        """One forward pass over the mixed batch. A failing request ends with its error; others go on.

        Raises:
            DeviceLostError: the engine is of no more use.
        """

    def abort(self, request_id: str) -> StepOutput | None:
        """End a request in whatever state it is; its blocks are free at once. None if it is not live.

        The output closes every open choice with `abort` and releases text that was held back.
        """

    def capacity(self, priority: int = 1) -> Capacity:
        """What could be admitted now for this priority; sequences of lower ones count as room."""

    def has_work(self) -> bool:
        """Whether a step would do anything, be it only to take in an adapter that was read."""

    def keep_adapters(self, pinned: Mapping[str, str], retired: Collection[str]) -> None:
        """What is to be in memory, and what need not; each call in place of the last. Nothing where none are served.

        Args:
            pinned: names by identity: read ahead and kept, as far as memory has room for another one beside them.
            retired: identities that no name stands for any more: they go with their last request.
        """

    def stats(self) -> EngineStats:
        """A snapshot."""

    def info(self) -> ModelInfo:
        """The model."""

    def close(self) -> None:
        """Nothing more is asked of it: end its threads, without waiting for what they are at."""

    def check(self) -> None:
        """Verify all invariants (blocks add up, every request in one state).

        Raises:
            AssertionError: one is broken.
        """
