"""The engine: requests in, deltas out, one forward pass a step. No Redis, no HTTP, no torch."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.adapters.tiers import AdapterTiers
from engine.block_pool import BlockPool
from engine.choice import ChoiceWriter, spelled
from engine.config import SchedulerConfig
from engine.detokenizer import Detokenizer
from engine.passes import INTERNAL, Flight, Passes
from engine.plan import Launcher, Runner, Sampled, Span, StepPlan
from engine.request import (
    AdapterStats,
    Capacity,
    ChoiceDelta,
    EngineRequest,
    EngineStats,
    ModelInfo,
    RequestUsage,
    ResumedChoice,
    StepOutput,
)
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.validation import (
    check_adapter,
    checked_length,
    checked_prompt,
    checked_prompt_logprobs,
    checked_resume,
)
from shared.errors import EngineError, InvalidRequestError, RopewayError

if TYPE_CHECKING:
    from engine.adapters.library import AdapterLibrary
    from engine.adapters.weights import Adapter

logger = logging.getLogger(__name__)

#: Seconds that a step waits for an adapter where there is nothing else to do.
_ADAPTER_WAIT_S = 0.05


@dataclass(slots=True, eq=False)
class _Live:
    """A request that is not over. `writers` are those of its open choices, by sequence."""

    id: str
    adapter: str | None = None
    writers: dict[Sequence, ChoiceWriter] = field(default_factory=dict)
    usage: RequestUsage = field(default_factory=RequestUsage)
    started: bool = False
    blocks: int = 0
    preemptions: int = 0
    # Last deltas of choices that were complete when they were taken up; the next step emits them.
    complete: list[ChoiceDelta] = field(default_factory=list)


class Engine:
    """Continuous batching over one runner. All calls come from one thread; see `EngineProtocol`."""

    def __init__(
        self,
        runner: Runner,
        info: ModelInfo,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        library: AdapterLibrary[Adapter] | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        """Serve a model; with a `library` also its adapters, whose loading goes on beside the steps.

        With a `launcher`, which is the runner again, a step begins a pass and then takes in the one before: what the
        host does for both is done while the device computes.
        """
        self.library, self.tokenizer = library, tokenizer
        self._runner = runner
        self._passes = Passes(runner, launcher)
        self._flight: Flight | None = None
        self._info = info
        self._config = config
        self._detokenizer = Detokenizer(tokenizer)
        self._pool = BlockPool(runner.num_blocks, runner.block_size, prefix_caching=config.enable_prefix_caching)
        self._tiers = None if library is None else AdapterTiers(library, config.max_loras)
        self._scheduler = Scheduler(config, self._pool, None if self._tiers is None else self._tiers.slots)
        self._eos = frozenset(info.eos_token_ids)
        self._live: dict[str, _Live] = {}
        self._complete: list[_Live] = []
        self._arrivals = 0
        self._stats = EngineStats(total_blocks=runner.num_blocks)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; see `EngineProtocol.add`.

        Raises:
            ContextLengthExceededError: too long for the context or for the whole KV cache.
            UnsupportedParameterError, ModelNotFoundError: an adapter that is not served.
            InvalidRequestError: anything else that can never be served; nothing is kept of the request.
        """
        if request.id in self._live:
            raise InvalidRequestError(f"request {request.id} is already live")
        check_adapter(request, self.library)
        context = min(self._config.max_model_len, self._info.max_model_len)
        kv_tokens = self._pool.num_blocks * self._pool.block_size
        prompt = checked_prompt(request, self._runner.vocab_size, min(context, kv_tokens))
        resumed = checked_resume(request, self._runner.vocab_size)
        scored = checked_prompt_logprobs(request, len(prompt))
        max_len = checked_length(len(prompt), request.params.max_tokens, context=context, kv_tokens=kv_tokens)
        live = _Live(request.id, request.adapter)
        live.usage.prompt_tokens = len(prompt)
        seed = request.params.seed
        if seed is None:
            seed = secrets.randbits(63)
        for index in range(request.params.n):
            sequence = self._sequence(request, index, prompt, max_len, seed)
            self._open(live, sequence, resumed.get(index))
        # Only now, so that a refused request leaves no trace.
        self._live[request.id] = live
        if self.library is not None and request.adapter is not None:
            self.library.want(request.adapter, request.adapter_name)
        sequences = list(live.writers)
        if request.params.prompt_logprobs is not None and sequences:
            sequences[0].scores, sequences[0].scored = True, scored
        for sequence in sequences:
            sequence.siblings = sequences if len(sequences) > 1 else []
            self._scheduler.add(sequence)
        if live.complete or not live.writers:
            self._complete.append(live)

    def step(self) -> list[StepOutput]:
        """One forward pass over the mixed batch; one output for each request with news.

        With a launcher the news are of the pass before, so that a step that begins the first of all has none.
        """
        outputs: dict[str, StepOutput] = {}
        self._emit_complete(outputs)
        self._turn(outputs)
        self._rest()
        for output in outputs.values():
            if not output.finished:
                self._account(self._live[output.request_id], output)
        return list(outputs.values())

    def abort(self, request_id: str) -> StepOutput | None:
        """End a request in whatever state it is; None if it is not live."""
        live = self._live.get(request_id)
        if live is None:
            return None
        deltas = live.complete
        for sequence, writer in list(live.writers.items()):
            try:
                deltas.append(writer.close("abort"))
            except Exception:  # an abort must free everything, whatever a detokenizer does with the rest of the text
                logger.exception("flushing an aborted choice failed: request %s", request_id)
                deltas.append(writer.close("error"))
            self._release(live, sequence)
        live.complete = []
        output = self._finish(live, StepOutput(request_id))
        output.choices = deltas
        self._rest()
        return output

    def capacity(self, priority: int = 1) -> Capacity:
        """What could be admitted now for this priority; lower ones count as room."""
        return self._scheduler.capacity(priority)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live) or (self.library is not None and self.library.awaited)

    def keep_adapters(self, pinned: Mapping[str, str], retired: Collection[str]) -> None:
        """See `EngineProtocol.keep_adapters`."""
        if self._tiers is not None:
            self._tiers.keep(pinned, retired)

    def stats(self) -> EngineStats:
        """A snapshot."""
        stats, scheduler, pool = self._stats, self._scheduler, self._pool
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            total_blocks=pool.num_blocks,
            free_blocks=pool.free,
            used_blocks=pool.used,
            cached_blocks=pool.cached,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            prefix_hit_tokens=scheduler.prefix_hits.hits,
            prefix_query_tokens=scheduler.prefix_hits.queries,
            prefix_hit_rate=scheduler.prefix_hits.recent,
            preemptions=scheduler.preemptions,
            adapters=self._adapter_stats(),
        )

    def _adapter_stats(self) -> AdapterStats:
        if self._tiers is None:
            return AdapterStats()
        running = {s.request_id for s in self._scheduler.sequences() if s.state is SequenceState.RUNNING}
        return self._tiers.stats((live.adapter, live.id in running) for live in self._live.values() if live.adapter)

    def info(self) -> ModelInfo:
        """The model."""
        return self._info

    def close(self) -> None:
        """See `EngineProtocol.close`."""
        if self.library is not None:
            self.library.close()

    def check(self) -> None:
        """Verify all invariants.

        Raises:
            AssertionError: one is broken.
        """
        self._scheduler.check([] if self._flight is None else self._flight.held)
        if self.library is not None:
            self.library.check(Counter(live.adapter for live in self._live.values() if live.adapter))
        queued = sorted((s.request_id, s.index) for s in self._scheduler.sequences())
        open_choices = sorted((live.id, s.index) for live in self._live.values() for s in live.writers)
        if queued != open_choices:
            raise AssertionError(f"queued sequences {queued} are not the open choices {open_choices}")
        if any(not live.writers and live not in self._complete for live in self._live.values()):
            raise AssertionError("a live request has nothing left to do")

    # --- adding ---

    def _sequence(self, request: EngineRequest, index: int, prompt: list[int], max_len: int, seed: int) -> Sequence:
        self._arrivals += 1
        return Sequence(
            request_id=request.id,
            index=index,
            params=request.params,
            seed=seed,
            tokens=list(prompt),
            prompt_len=len(prompt),
            max_len=max_len,
            eos_token_ids=self._eos,
            priority=request.priority,
            arrival=self._arrivals,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
        )

    def _open(self, live: _Live, sequence: Sequence, resumed: ResumedChoice | None) -> None:
        if resumed is not None:
            live.usage.completion_tokens += len(resumed.token_ids)
            if resumed.finish_reason is not None:
                return
        writer = ChoiceWriter(sequence, self._detokenizer)
        last = writer.resume(resumed) if resumed is not None else None
        if last is None:
            live.writers[sequence] = writer
        else:
            live.complete.append(last)

    # --- stepping ---

    def _turn(self, outputs: dict[str, StepOutput]) -> None:
        """Begin the next pass, and take in the one that is under way; or do one pass whole."""
        flight = self._flight
        if flight is not None and flight.pending is None:
            self._land(outputs)
            return
        plan = self._schedule(outputs)
        if plan is not None and plan.fills:
            plan = self._fill(plan, outputs)
        if plan is None or not plan.spans:
            self._land(outputs)
            return
        self._stats.steps += 1
        pending = self._passes.launch(plan)
        if flight is None and pending is None:
            self._apply_all(plan, self._passes.compute(plan), outputs)
            return
        held = self._scheduler.launched(plan)
        sound = self._land(outputs)
        self._flight = Flight(plan, pending if sound else None, held)

    def _land(self, outputs: dict[str, StepOutput]) -> bool:
        """Take in the pass under way, if there is one; whether what was launched behind it may be trusted."""
        flight, self._flight = self._flight, None
        if flight is None:
            return True
        plan, answers, sound = self._passes.land(flight)
        self._let_go(flight)
        self._apply_all(plan, answers, outputs)
        return sound

    def _let_go(self, flight: Flight) -> None:
        """It copies nothing any more."""
        held, flight.held = flight.held, []
        self._pool.release(held)

    def _rest(self) -> None:
        """Where nobody is left, a pass under way was for nobody."""
        if not self._live and self._flight is not None:
            self._let_go(self._flight)

    def _schedule(self, outputs: dict[str, StepOutput]) -> StepPlan | None:
        """The next pass; None where that under way has to land first.

        Where all wait for adapters that are being read, wait with them for a little while.
        """
        settled = self._flight is None
        if self.library is None:
            return self._scheduler.schedule(settled=settled)
        self._fail_all(self.library.poll(), outputs)
        plan = self._scheduler.schedule(settled=settled)
        if settled and plan is not None and not plan.spans and not outputs and self.library.pending:
            self._fail_all(self.library.poll(_ADAPTER_WAIT_S), outputs)
            plan = self._scheduler.schedule()
        return plan

    def _fail_all(self, failures: dict[str, RopewayError], outputs: dict[str, StepOutput]) -> None:
        """End the requests of adapters that cannot be had."""
        for live in [live for live in self._live.values() if live.adapter in failures]:
            assert live.adapter is not None
            self._fail(live, failures[live.adapter], self._output(live, outputs))

    def _fill(self, plan: StepPlan, outputs: dict[str, StepOutput]) -> StepPlan:
        """Bring adapters to their slots; the pass without those where that failed."""
        assert self._tiers is not None
        for slot, identity in plan.fills:
            try:
                self._runner.fill_slot(slot, self._tiers.library.get(identity))
                self._tiers.filled(slot, identity)
            except Exception:  # whatever is wrong with one adapter must not end the requests of others
                label = self._tiers.library.label(identity)
                logger.exception("adapter %s cannot be brought to slot %d", label, slot)
                self._fail_all({identity: EngineError(INTERNAL)}, outputs)
                self._tiers.evict(identity)
        return plan.still_running()

    def _apply_all(self, plan: StepPlan, answers: list[Sampled | None], outputs: dict[str, StepOutput]) -> None:
        for span, answer in zip(plan.spans, answers, strict=True):
            sequence = span.sequence
            if span.sample and sequence.ahead:
                sequence.ahead -= 1
            # Else a sibling in this pass has failed, or it was over before the pass was.
            if sequence.state is SequenceState.RUNNING:
                self._apply(span, answer, outputs)

    def _apply(self, span: Span, answer: Sampled | None, outputs: dict[str, StepOutput]) -> None:
        """What one span's result means for its request."""
        live = self._live[span.sequence.request_id]
        self._count(live, span.sequence, outputs)
        error = self._fault(span, answer)
        delta: ChoiceDelta | None = None
        if error is None:
            self._scheduler.advance(span)
            if answer is None:
                return
            try:
                if answer.prompt_logprobs:
                    entries = [spelled(entry, self._detokenizer) for entry in answer.prompt_logprobs]
                    self._output(live, outputs).prompt_logprobs += entries
                if answer.token_id is not None:
                    delta = live.writers[span.sequence].push(answer.token_id, answer.logprob)
            except Exception:  # a detokenizer that chokes on one text must not end the others
                logger.exception("detokenizing failed for request %s", live.id)
                error = EngineError(INTERNAL)
        if error is not None:
            self._fail(live, error, self._output(live, outputs))
        elif delta is not None:
            self._emit(live, span.sequence, delta, self._output(live, outputs))

    def _emit(self, live: _Live, sequence: Sequence, delta: ChoiceDelta, output: StepOutput) -> None:
        live.usage.completion_tokens += 1
        self._stats.generated_tokens += 1
        output.choices.append(delta)
        if delta.finish_reason is not None:
            self._release(live, sequence)
            if not live.writers:
                self._finish(live, output)

    def _fault(self, span: Span, answer: Sampled | None) -> RopewayError | None:
        """Why the answer cannot be used."""
        if answer is not None and answer.error is not None:
            return answer.error
        if len(answer.prompt_logprobs if answer is not None else ()) != len(span.scored):
            return EngineError("the model did not give the prompt's log probabilities")
        if not span.sample:
            return None
        if answer is None or answer.token_id is None:
            return EngineError("the model gave no token")
        if not 0 <= answer.token_id < self._runner.vocab_size:
            logger.error("token id %d is not in the vocabulary: request %s", answer.token_id, span.sequence.request_id)
            return EngineError("the model gave a token id outside of its vocabulary")
        return None

    def _count(self, live: _Live, sequence: Sequence, outputs: dict[str, StepOutput]) -> None:
        if not live.started:
            live.started = self._output(live, outputs).started = True
            live.usage.cached_tokens = min(sequence.hit_tokens or 0, sequence.prompt_len)
            self._stats.prompt_tokens += live.usage.prompt_tokens
        if len(live.writers) == 1:
            held = len(sequence.block_table)
        else:
            held = len({block for sibling in live.writers for block in sibling.block_table})
        if held > live.blocks:
            live.blocks = held

    def _output(self, live: _Live, outputs: dict[str, StepOutput]) -> StepOutput:
        output = outputs.get(live.id)
        if output is None:
            output = outputs[live.id] = StepOutput(live.id)
        return output

    def _emit_complete(self, outputs: dict[str, StepOutput]) -> None:
        """Last deltas of choices that had ended before they were taken up."""
        complete, self._complete = self._complete, []
        for live in complete:
            output = self._output(live, outputs)
            output.choices += live.complete
            live.complete = []
            if not live.writers:
                self._finish(live, output)

    # --- ending ---

    def _fail(self, live: _Live, error: RopewayError, output: StepOutput) -> None:
        """End the request with an error; a choice that had news in this very step keeps its one delta."""
        news = {delta.index: delta for delta in output.choices}
        for sequence, writer in list(live.writers.items()):
            last = writer.close("error")
            if sequence.index in news:
                news[sequence.index].finish_reason = "error"
            else:
                output.choices.append(last)
            self._release(live, sequence, failed=True)
        output.error = error
        self._finish(live, output)

    def _release(self, live: _Live, sequence: Sequence, *, failed: bool = False) -> None:
        """The choice is over: its blocks are free."""
        self._scheduler.finish(sequence, failed=failed)
        live.preemptions += sequence.preemptions
        del live.writers[sequence]

    def _finish(self, live: _Live, output: StepOutput) -> StepOutput:
        """The request is over. Its last output says all that there is to say."""
        del self._live[live.id]
        if self._tiers is not None and live.adapter is not None:
            self._tiers.let_go(live.adapter)
        if live in self._complete:
            self._complete.remove(live)
        output.finished = True
        self._account(live, output)
        return output

    @staticmethod
    def _account(live: _Live, output: StepOutput) -> None:
        # Numbers alone: the caller may keep the output while the request goes on.
        usage, told = live.usage, output.usage
        told.prompt_tokens, told.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        told.cached_tokens = usage.cached_tokens
        output.blocks, output.preemptions = live.blocks, live.preemptions
        for sequence in live.writers:
            output.preemptions += sequence.preemptions
