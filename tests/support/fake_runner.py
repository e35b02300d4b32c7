"""A runner without a model: it checks the scheduler's book-keeping of KV slots, and its tokens are a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import blake2b
from typing import Literal

from engine.adapters.weights import Adapter
from engine.plan import Sampled, Span, StepPlan
from engine.request import LogprobEntry, ModelInfo
from engine.sequence import Sequence
from shared.errors import EngineError
from tests.support.tiny_tokenizer import EOS, VOCAB_SIZE

#: Chooses the next token of a sequence from nothing but the sequence's own tokens, seed and choice index.
NextToken = Callable[[Sequence], int]

#: How the spans of one request fail: the answer is an error, the whole pass raises, the id is out of the vocabulary, or
#: there is no answer at all.
Fault = Literal["error", "raise", "token", "silent"]


def hashed_token(sequence: Sequence) -> int:
    """The next token as a hash of all known tokens; about one in thirty is EOS."""
    return hashed(sequence.adapter, sequence.seed, sequence.index, sequence.tokens)


def hashed(adapter: str | None, seed: int, index: int, tokens: list[int]) -> int:
    """What `hashed_token` gives behind these tokens. Of integers, `hash` is the same in every process."""
    draw = hash((_root(adapter), seed, index, *tokens)) >> 8
    return EOS if draw % 30 == 0 else draw % VOCAB_SIZE


def scripted(*outputs: Iterable[int]) -> NextToken:
    """Choice `i` says `outputs[i]`, and EOS from there on."""
    scripts = [list(output) for output in outputs]

    def choose(sequence: Sequence) -> int:
        script = scripts[sequence.index]
        return script[sequence.output_len] if sequence.output_len < len(script) else EOS

    return choose


class CorruptCacheError(BaseException):
    """A span would read a slot that does not hold its own sequence's state.

    Not an Exception: the engine must not take it for the failure of one request.
    """


class FakeRunner:
    """Keeps, per KV slot, a hash of the whole prefix that a real cache would hold there.

    Before a pass it verifies that every slot a span reads was written for exactly this prefix, and that no span writes
    a block that another span of the pass can see. Log probabilities are a function of that hash and of the token.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = VOCAB_SIZE,
        next_token: NextToken = hashed_token,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.next_token = next_token
        self.plans: list[list[tuple[str, int, int, int]]] = []  # per pass: (request, choice, start, count)
        self.decodes: list[int] = []  # per pass: how many of its spans are decodes
        self.priorities: list[list[int]] = []  # per pass: of its spans
        self.computed_tokens = 0
        self.copied = 0
        self.slots: dict[int, str] = {}
        self.fills: list[tuple[int, str]] = []
        self._blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._prefixes: dict[Sequence, _Prefix] = {}

    def fill_slot(self, slot: int, adapter: Adapter) -> None:
        """Remember who is in the slot: whoever runs must find its own adapter there."""
        self.slots[slot] = adapter.identity
        self.fills.append((slot, adapter.identity))

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """One pass: verify what is read, write, answer."""
        self._copy(plan.copies)
        states = [self._states(span.sequence) for span in plan.spans]
        for span, state in zip(plan.spans, states, strict=True):
            self._verify(span, state)
        self._verify_writes(plan)
        for span, state in zip(plan.spans, states, strict=True):
            self._write(span, state)
        self.plans.append([(s.sequence.request_id, s.sequence.index, s.start, s.count) for s in plan.spans])
        self.decodes.append(plan.decodes)
        self.priorities.append([span.sequence.priority for span in plan.spans])
        self.computed_tokens += plan.tokens
        return [self._answer(span, state) for span, state in zip(plan.spans, states, strict=True)]

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written, as in one call over index vectors."""
        targets = [target for _, target in copies]
        if len(set(targets)) != len(targets):
            raise CorruptCacheError(f"two copies into one block: {copies}")
        self.copied += len(copies)
        for target, content in [(target, list(self._blocks[source])) for source, target in copies]:
            self._blocks[target] = content

    def _answer(self, span: Span, states: list[int]) -> Sampled | None:
        if not span.sample and not span.scored:
            return None
        sequence = span.sequence
        answer = Sampled(None)
        if span.sample:
            answer.token_id = self.next_token(sequence)
            if sequence.params.logprobs is not None:
                answer.logprob = self._entry(states[-1], answer.token_id, sequence.params.logprobs)
        if span.scored:
            tokens, wanted = sequence.tokens, sequence.params.prompt_logprobs or 0
            answer.prompt_logprobs = [self._entry(states[p], tokens[p + 1], wanted) for p in span.scored]
        return answer

    def _entry(self, state: int, token: int, wanted: int) -> LogprobEntry:
        """The entry of a token behind a prefix: the best of its candidates."""
        ids = [token, *((state + other) % self.vocab_size for other in range(1, wanted))][:wanted]
        top = [(candidate, _logprob(state, candidate), rank, b"") for rank, candidate in enumerate(ids, 1)]
        return LogprobEntry(token, _logprob(state, token), 1, top=top)

    def _states(self, sequence: Sequence) -> list[int]:
        """A hash of each prefix of its tokens, kept from pass to pass."""
        prefix = self._prefixes.get(sequence)
        if prefix is None:
            prefix = self._prefixes[sequence] = _Prefix(_root(sequence.adapter))
        return prefix.extend(sequence.tokens)

    def _write(self, span: Span, states: list[int]) -> None:
        size, table = self.block_size, span.sequence.block_table
        for position in range(span.start, span.start + span.count):
            self._blocks[table[position // size]][position % size] = states[position]

    def _verify(self, span: Span, states: list[int]) -> None:
        if self.slots.get(span.sequence.adapter_slot) != span.sequence.adapter:
            raise CorruptCacheError(f"{span.sequence.request_id} finds another adapter in its slot")
        sequence, size, end = span.sequence, self.block_size, span.start + span.count
        known = len(sequence.tokens)
        if span.count < 1 or end > known or span.sample != (end == known):
            raise CorruptCacheError(f"a span of {span.start}+{span.count} over {known} tokens, sample={span.sample}")
        if span.scored and not (
            sequence.params.prompt_logprobs is not None
            and span.scored.step == 1
            and span.start <= span.scored.start
            and span.scored.stop <= min(end, sequence.prompt_len - 1)
        ):
            raise CorruptCacheError(f"{span.scored} scored in {span.start}+{span.count}, prompt {sequence.prompt_len}")
        for first in range(0, span.start, size):
            expected = states[first : min(first + size, span.start)]
            if self._blocks[sequence.block_table[first // size]][: len(expected)] != expected:
                raise CorruptCacheError(f"{sequence.request_id} reads another's slot behind position {first}")

    def _verify_writes(self, plan: StepPlan) -> None:
        holders: Counter[int] = Counter()
        for span in plan.spans:
            holders.update(span.sequence.block_table)
        for span in plan.spans:
            first, last = span.start // self.block_size, (span.start + span.count - 1) // self.block_size
            for block in span.sequence.block_table[first : last + 1]:
                if holders[block] != 1:
                    raise CorruptCacheError(f"block {block} is written while another sequence holds it")
        decodes = plan.spans[: plan.decodes]
        if any(span.count != 1 or not span.sample for span in decodes):
            raise CorruptCacheError("a decode is not one token")


class FaultyRunner(FakeRunner):
    """Fails as told.

    Attributes:
        guilty: how the spans of a request fail, by its id.
        breaks: the next pass raises as a whole, whoever is in it, with nothing done or behind its last write.
        unfit: adapters that cannot be brought to a slot.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        super().__init__(num_blocks, block_size)
        self.guilty: dict[str, Fault] = {}
        self.breaks: Literal["before", "behind"] | None = None
        self.unfit: set[str] = set()

    def fill_slot(self, slot: int, adapter: Adapter) -> None:
        """As `FakeRunner.fill_slot`; where it fails the slot holds nobody's weights."""
        if adapter.identity in self.unfit:
            self.slots[slot] = "garbage"
            raise RuntimeError("this adapter is told to fail")
        super().fill_slot(slot, adapter)

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """As `FakeRunner.execute`."""
        breaks, self.breaks = self.breaks, None
        if breaks == "before":
            raise RuntimeError("this pass is told to fail before it begins")
        answers = super().execute(plan)
        if breaks == "behind" or any(self.guilty.get(span.sequence.request_id) == "raise" for span in plan.spans):
            raise RuntimeError("this pass is told to fail")
        return [self._spoilt(span, answer) for span, answer in zip(plan.spans, answers, strict=True)]

    def _spoilt(self, span: Span, answer: Sampled | None) -> Sampled | None:
        fault = self.guilty.get(span.sequence.request_id)
        if fault == "error":
            return Sampled(None, error=EngineError("this row is told to fail"))
        if fault == "token" and answer is not None and answer.token_id is not None:
            answer.token_id = (-1, self.vocab_size, 2**40)[answer.token_id % 3]
        if fault == "silent":
            return None
        return answer


class LaunchingRunner(FaultyRunner):
    """Launches passes, too: they are computed at once, and known later. Faults show in turns now and later.

    What fails later, and what was launched behind it, leaves nothing but garbage.

    Attributes:
        hosts: requests of which the host is needed before a pass ends.
        launched, landed, late: passes that were begun, that were asked for, and that failed when they were.
        behind: passes that were begun behind one that fails.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        super().__init__(num_blocks, block_size)
        self.hosts: set[str] = set()
        self.launched = self.landed = self.late = self.behind = 0
        self._given: dict[Sequence, dict[int, int]] = {}
        self._failing = False  # a pass is under way that fails

    def launches(self, plan: StepPlan) -> bool:
        """Not where log probabilities are asked for, or the host is needed."""
        return not any(
            span.scored or (span.sample and (s.params.logprobs is not None or s.request_id in self.hosts))
            for span in plan.spans
            for s in [span.sequence]
        )

    def launch(self, plan: StepPlan) -> _Launched:
        """As `execute`, with the tokens that the pass before gave."""
        known = [len(span.sequence.tokens) for span in plan.spans]
        for span, count in zip(plan.spans, known, strict=True):
            given = self._given.get(span.sequence, {})
            span.sequence.tokens += [given[p] for p in range(count, span.start + span.count)]
        try:
            pending = self._begin(plan)
        finally:
            for span, count in zip(plan.spans, known, strict=True):
                del span.sequence.tokens[count:]
        self.launched += 1
        for span, answer in zip(plan.spans, pending.answers, strict=True):
            if span.sample:
                token = 0 if answer is None or answer.token_id is None else answer.token_id
                self._given[span.sequence] = {span.start + span.count: token}
        return pending

    def _begin(self, plan: StepPlan) -> _Launched:
        if self._failing:
            self.behind += 1
            return _Launched(self, self._garbage(plan), fails=False)
        if self.launched % 2:
            return _Launched(self, self.execute(plan), fails=False)
        breaks, self.breaks = self.breaks, None
        answers = FakeRunner.execute(self, plan)
        guilty = [self.guilty.get(span.sequence.request_id) for span in plan.spans]
        self._failing = breaks is not None or "raise" in guilty
        if self._failing:
            return _Launched(self, self._garbage(plan), fails=True)
        spoilt = [self._spoilt(span, answer) for span, answer in zip(plan.spans, answers, strict=True)]
        return _Launched(self, spoilt, fails=False)

    def _garbage(self, plan: StepPlan) -> list[Sampled | None]:
        """What a pass gives that nobody may trust: it writes where it would, and not what it would."""
        self._copy(plan.copies)
        for span in plan.spans:
            for position in range(span.start, span.start + span.count):
                block = span.sequence.block_table[position // self.block_size]
                self._blocks[block][position % self.block_size] = None
        return [Sampled(position % EOS) if span.sample else None for position, span in enumerate(plan.spans)]


class _Launched:
    """A pass of a `LaunchingRunner`."""

    def __init__(self, runner: LaunchingRunner, answers: list[Sampled | None], *, fails: bool) -> None:
        self.answers = answers
        self._runner, self._fails = runner, fails

    def result(self) -> list[Sampled | None]:
        """What it gave."""
        self._runner.landed += 1
        if self._fails:
            self._runner.late += 1
            self._runner._failing = False
            raise RuntimeError("this pass is told to fail on its way")
        return self.answers


class _Prefix:
    """Hashes of all prefixes of a list of tokens that only ever grows."""

    def __init__(self, root: int) -> None:
        self._last = root
        self._tokens: list[int] = []
        self._states: list[int] = []

    def extend(self, tokens: list[int]) -> list[int]:
        """One hash per token, at least. Those of a longer list begin with those of a shorter one.

        The list is shorter only where a pass is computed again that others had been launched behind.
        """
        done = len(self._tokens)
        if tokens[:done] != self._tokens[: len(tokens)]:
            raise CorruptCacheError(f"known tokens {self._tokens} became {tokens[:done]}")
        for token in tokens[done:]:
            self._last = hash((self._last, token))
            self._states.append(self._last)
        self._tokens += tokens[done:]
        return self._states


@cache
def _root(adapter: str | None) -> int:
    return int.from_bytes(blake2b(repr(adapter).encode(), digest_size=8).digest(), "little")


def _logprob(state: int, token: int) -> float:
    return -1e-3 * (hash((state, token)) % 10_000)


def model_info(max_model_len: int = 512, vocab_size: int = VOCAB_SIZE, eos: Iterable[int] = (EOS,)) -> ModelInfo:
    """Facts of a model that is not there."""
    return ModelInfo(
        name="fake",
        digest="0" * 64,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=list(eos),
        kv_tokens=0,
        dtype="none",
        tokenizer_json="{}",
        chat_template=None,
    )
