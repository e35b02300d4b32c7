"""`SimEngine`: an engine with a cost model in place of a model, for load and chaos tests. It needs no torch.

Scheduling is real, if plain: continuous batching, chunked prefill, block accounting, preemption by recompute, classes,
slots of adapters. Tokens are a pure function of (prompt, adapter, seed, choice index, position), the prompt's log
probabilities of adapter and its tokens up to theirs, so a job that is taken up by another engine goes on with the same
text and numbers, and one that is computed with another adapter does not.
"""

from __future__ import annotations

import secrets
import time
from bisect import insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from engine.adapters.library import AdapterSource
from engine.request import (
    Capacity,
    ChoiceDelta,
    EngineRequest,
    EngineStats,
    FinishReason,
    LogprobEntry,
    ModelInfo,
    RequestUsage,
    StepOutput,
)
from engine.sim_adapters import SIM_MODULES, SimAdapters
from engine.sim_model import CHAT_TEMPLATE, END, PromptSource, SimVocabulary, TextStream, TokenSource
from engine.validation import check_adapter, checked_length, checked_prompt, checked_prompt_logprobs, checked_resume
from shared.errors import InvalidRequestError

#: Seconds that a step waits for an adapter where there is nothing else to do.
_ADAPTER_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class SimConfig:
    """What the simulated engine costs and holds.

    Attributes:
        step_ms, token_us: a step sleeps `step_ms` plus `token_us` for each of its tokens; 0 and 0 do not sleep.
        eos_period: an answer ends at each position with a chance of one in this many.
        max_loras: slots of adapters; 0: none are served.
        max_cpu_loras, max_lora_rank: as an engine's.
        adapter_load_ms: what it takes to read an adapter, beside the steps.
        max_bypasses: admissions past a sequence without a slot after which it claims one.
    """

    name: str = "sim"
    step_ms: float = 10.0
    token_us: float = 0.0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    block_size: int = 16
    num_blocks: int = 16_384
    max_model_len: int = 4096
    eos_period: int = 256
    max_loras: int = 0
    max_cpu_loras: int = 16
    max_lora_rank: int = 16
    adapter_load_ms: float = 0.0
    max_bypasses: int = 32


@dataclass(slots=True, eq=False)
class _Request:
    """A live request. `open` are its choices that go on; `closed_tokens` counts output of those that ended.

    `scores` makes the prompt's log probabilities, None where not asked for; `scored` of them are given out.
    """

    source: EngineRequest
    scores: PromptSource | None = None
    scored: int = 0
    open: list[_Choice] = field(default_factory=list)
    closed_tokens: int = 0
    started: bool = False
    peak_blocks: int = 0
    preemptions: int = 0

    def usage(self) -> RequestUsage:
        output = self.closed_tokens + sum(len(choice.output) for choice in self.open)
        return RequestUsage(len(self.source.prompt_token_ids), output)


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice in the batch or waiting for it. `computed` tokens of prompt and output are in the cache."""

    owner: _Request
    index: int
    order: tuple[int, int, int]
    source: TokenSource
    text: TextStream
    limit: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: int = 0
    running: bool = False
    bypassed: int = 0

    @property
    def adapter(self) -> str | None:
        return self.owner.source.adapter

    @property
    def length(self) -> int:
        return len(self.owner.source.prompt_token_ids) + len(self.output)


_order = attrgetter("order")


class SimEngine:
    """Implements `EngineProtocol` without a model."""

    def __init__(self, config: SimConfig | None = None, source: AdapterSource | None = None) -> None:
        """An engine; its adapters come from `source`, or without one of nowhere: then every identity is served."""
        self._config = config = config or SimConfig()
        self._adapters = SimAdapters(
            config.max_loras, config.max_cpu_loras, config.adapter_load_ms, config.max_bypasses, source
        )
        self._vocabulary = SimVocabulary()
        self._requests: dict[str, _Request] = {}
        self._running: list[_Choice] = []
        self._waiting: list[_Choice] = []
        self._used_blocks = 0
        self._arrivals = 0
        self._counters = EngineStats()

    # The interface

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never be served.
        """
        if request.id in self._requests:
            raise InvalidRequestError("a request with this id is live")
        check_adapter(request, self._adapters.library)
        context, kv_tokens = self._config.max_model_len, self._config.num_blocks * self._config.block_size
        prompt = checked_prompt(request, self._vocabulary.size, min(context, kv_tokens))
        request, params = replace(request, prompt_token_ids=prompt), request.params
        resumed = checked_resume(request, self._vocabulary.size)
        live = _Request(request, scored=checked_prompt_logprobs(request, len(prompt)))
        limit = checked_length(len(prompt), params.max_tokens, context=context, kv_tokens=kv_tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if params.prompt_logprobs is not None:
            live.scores = PromptSource(self._vocabulary, prompt, request.adapter, params.prompt_logprobs)
        for index in range(params.n):
            former = resumed.get(index)
            if former is not None and former.finish_reason is not None:
                live.closed_tokens += len(former.token_ids)
                continue
            choice = _Choice(
                live,
                index,
                (request.priority, self._arrivals, index),
                TokenSource(self._vocabulary, prompt, request.adapter, params, seed, index, self._config.eos_period),
                TextStream(self._vocabulary, params),
                limit,
            )
            if former is not None:
                for token in former.token_ids:
                    choice.output.append(token)
                    choice.text.push(token, len(choice.output))
                choice.text.skip(len(former.text))
            live.open.append(choice)
            insort(self._waiting, choice, key=_order)
        self._arrivals += 1
        self._requests[request.id] = live
        self._adapters.want(request.adapter, request.adapter_name)

    def step(self) -> list[StepOutput]:
        """One simulated pass: decodes first, then prefill chunks."""
        outputs: dict[str, StepOutput] = {
            request_id: self._output(request, finished=True)
            for request_id, request in list(self._requests.items())
            if not request.open
        }
        self._take_adapters(outputs)
        self._admit()
        plan = self._plan()
        self._adapters.fill()
        self._sleep(sum(plan.values()))
        for choice, count in plan.items():
            if not choice.running:  # preempted by one planned before it
                continue
            self._compute(choice, count, outputs)
        self._counters.steps += 1
        return list(outputs.values())

    def abort(self, request_id: str) -> StepOutput | None:
        """End a request; None if it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        deltas = [self._close(choice, [], "abort") for choice in list(request.open)]
        return self._output(request, finished=True, choices=deltas)

    def capacity(self, priority: int = 1) -> Capacity:
        """What could be admitted now; every live choice counts with the blocks of its longest possible answer."""
        held = [
            choice
            for request in self._requests.values()
            if request.source.priority <= priority
            for choice in request.open
        ]
        blocks = self._config.num_blocks - sum(self._blocks(choice.limit) for choice in held)
        return Capacity(max(0, self._config.max_num_seqs - len(held)), max(0, blocks) * self._config.block_size)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests) or self._adapters.awaited

    def keep_adapters(self, pinned: Mapping[str, str], retired: Collection[str]) -> None:
        """See `EngineProtocol.keep_adapters`."""
        self._adapters.keep(pinned, retired)

    def stats(self) -> EngineStats:
        """A snapshot."""
        counters = self._counters
        counters.running, counters.waiting = len(self._running), len(self._waiting)
        counters.total_blocks, counters.used_blocks = self._config.num_blocks, self._used_blocks
        counters.free_blocks = self._config.num_blocks - self._used_blocks
        uses = [(r.source.adapter, any(choice.running for choice in r.open)) for r in self._requests.values()]
        return replace(counters, adapters=self._adapters.stats(uses))

    def info(self) -> ModelInfo:
        """The simulated model."""
        return ModelInfo(
            name=self._config.name,
            digest=self._vocabulary.digest(self._config.eos_period),
            max_model_len=self._config.max_model_len,
            vocab_size=self._vocabulary.size,
            eos_token_ids=[self._vocabulary.end_id],
            kv_tokens=self._config.num_blocks * self._config.block_size,
            dtype="sim",
            tokenizer_json=self._vocabulary.tokenizer_json,
            chat_template=CHAT_TEMPLATE,
            special_tokens={"eos_token": END},
            adapter_modules=dict(SIM_MODULES) if self._config.max_loras else {},
            max_lora_rank=self._config.max_lora_rank if self._config.max_loras else 0,
        )

    def close(self) -> None:
        """See `EngineProtocol.close`."""
        if self._adapters.library is not None:
            self._adapters.library.close()

    def check(self) -> None:
        """Verify that blocks add up and that every open choice is in one state.

        Raises:
            AssertionError: they do not.
        """
        choices = [choice for request in self._requests.values() for choice in request.open]
        expected = sum(choice.blocks for choice in choices)
        if self._used_blocks != expected or not 0 <= self._used_blocks <= self._config.num_blocks:
            raise AssertionError(f"{self._used_blocks} blocks are in use, sequences hold {expected}")
        if {id(c) for c in choices} != {id(c) for c in self._running + self._waiting}:
            raise AssertionError("a choice is neither running nor waiting, or is over and still listed")
        if any(not c.running for c in self._running) or any(c.running or c.blocks for c in self._waiting):
            raise AssertionError("a choice is in two states")
        live = [request.source.adapter for request in self._requests.values()]
        self._adapters.check([choice.adapter for choice in self._running], live)

    # Adapters

    def _take_adapters(self, outputs: dict[str, StepOutput]) -> None:
        """Take in what was read. Where nothing else is to be done, wait for it a little while."""
        ready = self._running or outputs or any(self._adapters.ready(choice.adapter) for choice in self._waiting)
        failures = self._adapters.poll(0.0 if ready else _ADAPTER_WAIT_S)
        for request in [r for r in self._requests.values() if r.source.adapter in failures]:
            assert request.source.adapter is not None
            deltas = [self._close(choice, [], "error") for choice in list(request.open)]
            output = outputs[request.source.id] = self._output(request, finished=True, choices=deltas)
            output.error = failures[request.source.adapter]

    # Admission and blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)

    def _admit(self) -> None:
        """Move waiting choices into the batch in order; the first that does not fit holds the others back.

        Those whose adapter has no slot are passed.
        """
        self._adapters.begin()
        passed: list[_Choice] = []
        while len(passed) < len(self._waiting):
            choice = self._waiting[len(passed)]
            if not self._adapters.has_slot(choice.adapter, choice.bypassed, choice.owner.preemptions > 0):
                passed.append(choice)
                continue
            need = self._blocks(min(choice.length + 1, choice.limit))
            while not self._fits(need):
                victim = self._running[-1] if self._running else None
                if victim is None or victim.order[0] <= choice.order[0]:
                    return
                self._preempt(victim)
            self._waiting.remove(choice)
            self._hold(choice, need)
            self._adapters.acquire(choice.adapter)
            for other in passed:
                other.bypassed += 1
            choice.running, choice.bypassed = True, 0
            insort(self._running, choice, key=_order)

    def _fits(self, blocks: int) -> bool:
        return len(self._running) < self._config.max_num_seqs and blocks <= self._config.num_blocks - self._used_blocks

    def _hold(self, choice: _Choice, blocks: int) -> None:
        self._used_blocks += blocks - choice.blocks
        choice.blocks = blocks
        held = sum(other.blocks for other in choice.owner.open)
        choice.owner.peak_blocks = max(choice.owner.peak_blocks, held)

    def _preempt(self, choice: _Choice) -> None:
        """Give its blocks back; it keeps its tokens and computes them again."""
        self._running.remove(choice)
        self._adapters.release(choice.adapter)
        self._hold(choice, 0)
        choice.computed, choice.running = 0, False
        choice.owner.preemptions += 1
        self._counters.preemptions += 1
        insort(self._waiting, choice, key=_order)

    def _plan(self) -> dict[_Choice, int]:
        """Tokens to compute by choice: decodes first, then chunks of prefill, up to the step's budget."""
        budget, plan = self._config.max_num_batched_tokens, {}
        decoding = [choice for choice in self._running if choice.length - choice.computed == 1]
        prefilling = [choice for choice in self._running if choice.length - choice.computed > 1]
        for choice in decoding + prefilling:
            count = min(budget, choice.length - choice.computed)
            if not choice.running or count <= 0:
                continue
            need = self._blocks(choice.computed + count)
            while choice.running and need - choice.blocks > self._config.num_blocks - self._used_blocks:
                self._preempt(self._running[-1])
            if choice.running:
                self._hold(choice, max(need, choice.blocks))
                plan[choice] = count
                budget -= count
        return plan

    def _sleep(self, tokens: int) -> None:
        seconds = self._config.step_ms / 1e3 + tokens * self._config.token_us / 1e6
        if seconds > 0:
            time.sleep(seconds)

    # Tokens

    def _compute(self, choice: _Choice, count: int, outputs: dict[str, StepOutput]) -> None:
        """Advance a choice by its planned tokens, and sample where its last known token is among them."""
        request = choice.owner
        output = outputs.setdefault(request.source.id, StepOutput(request.source.id))
        output.started |= not request.started
        request.started = True
        known = min(len(request.source.prompt_token_ids), choice.computed + count)
        self._counters.prompt_tokens += max(0, known - choice.computed)
        choice.computed += count
        output.prompt_logprobs += self._score(request, known)
        if choice.computed == choice.length:
            output.choices.append(self._sample(choice))
        output.usage, output.finished = request.usage(), not request.open
        output.blocks, output.preemptions = request.peak_blocks, request.preemptions
        if output.finished:
            self._forget(request)

    def _score(self, request: _Request, known: int) -> list[LogprobEntry]:
        """Log probabilities of the prompt that its first `known` tokens give and that are not given out yet."""
        if request.scores is None:
            return []
        new = range(request.scored, min(known, len(request.source.prompt_token_ids) - 1))
        request.scored += len(new)
        return [request.scores.logprob(position) for position in new]

    def _sample(self, choice: _Choice) -> ChoiceDelta:
        """The next token of a choice and what follows from it."""
        params, position = choice.owner.source.params, len(choice.output)
        if choice.length >= choice.limit:  # taken up when its last token had been published
            return self._close(choice, [], "length")
        token = choice.source.token(position)
        entry = [choice.source.logprob(position, token)] if params.logprobs is not None else None
        choice.output.append(token)
        self._counters.generated_tokens += 1
        reason: FinishReason | None = None
        stop: str | int | None = None
        may_stop = len(choice.output) > params.min_tokens
        if may_stop and token == self._vocabulary.end_id and not params.ignore_eos:
            reason = "stop"
        elif may_stop and token in (params.stop_token_ids or ()):
            reason, stop = "stop", token
        elif (stop := choice.text.push(token, len(choice.output))) is not None:
            reason = "stop"
        elif choice.length >= choice.limit:
            reason = "length"
        if reason is None:
            return ChoiceDelta(choice.index, position, [token], choice.text.take(final=False), entry)
        delta = self._close(choice, [token], reason)
        delta.logprobs, delta.stop_reason = entry, stop
        return delta

    def _close(self, choice: _Choice, new: list[int], reason: FinishReason) -> ChoiceDelta:
        """End a choice: its blocks are free, text that was held back is released."""
        request = choice.owner
        (self._running if choice.running else self._waiting).remove(choice)
        if choice.running:
            self._adapters.release(choice.adapter)
        self._hold(choice, 0)
        request.open.remove(choice)
        request.closed_tokens += len(choice.output)
        return ChoiceDelta(
            choice.index, len(choice.output) - len(new), new, choice.text.take(final=True), finish_reason=reason
        )

    def _output(self, request: _Request, *, finished: bool, choices: list[ChoiceDelta] | None = None) -> StepOutput:
        self._forget(request)
        return StepOutput(
            request.source.id,
            choices or [],
            finished=finished,
            usage=request.usage(),
            blocks=request.peak_blocks,
            preemptions=request.preemptions,
        )

    def _forget(self, request: _Request) -> None:
        del self._requests[request.source.id]
        self._adapters.let_go(request.source.adapter)
