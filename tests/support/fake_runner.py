"""A runner without a model: it checks the scheduler's book-keeping of KV slots, and its tokens are a pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b

from engine.plan import Sampled, Span, StepPlan
from engine.request import LogprobEntry, ModelInfo
from engine.sequence import Sequence
from tests.support.tiny_tokenizer import EOS, VOCAB_SIZE

#: Chooses the next token of a sequence from nothing but the sequence's own tokens, seed and choice index.
NextToken = Callable[[Sequence], int]


def hashed_token(sequence: Sequence) -> int:
    """The next token as a hash of all known tokens; about one in thirty is EOS."""
    text = f"{sequence.seed}/{sequence.index}/{sequence.adapter}/{sequence.tokens}".encode()
    draw = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
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
    a block that another span of the pass can see.
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
        self.computed_tokens = 0
        self._slots: dict[int, bytes] = {}

    def has_adapter(self, adapter: str) -> bool:
        """Any: its tokens depend on the name."""
        return True

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """One pass: verify what is read, write, answer."""
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self._slots[target * self.block_size + offset] = self._slots[source * self.block_size + offset]
        states = [self._states(span.sequence) for span in plan.spans]
        for span, state in zip(plan.spans, states, strict=True):
            self._verify(span, state)
        self._verify_writes(plan)
        for span, state in zip(plan.spans, states, strict=True):
            for position in range(span.start, span.start + span.count):
                self._slots[self._slot(span.sequence, position)] = state[position]
        self.plans.append([(s.sequence.request_id, s.sequence.index, s.start, s.count) for s in plan.spans])
        self.computed_tokens += plan.tokens
        return [self._answer(span) if span.sample else None for span in plan.spans]

    def _answer(self, span: Span) -> Sampled:
        token = self.next_token(span.sequence)
        wanted = span.sequence.params.logprobs
        entry = None
        if wanted is not None:
            entry = LogprobEntry(token, -0.5, 1, top=[(token, -0.5, 1, b"")] * wanted)
        return Sampled(token, entry)

    def _states(self, sequence: Sequence) -> list[bytes]:
        state = repr(sequence.adapter).encode()
        states = []
        for token in sequence.tokens:
            state = blake2b(state + token.to_bytes(8, "little"), digest_size=16).digest()
            states.append(state)
        return states

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _verify(self, span: Span, states: list[bytes]) -> None:
        known = len(span.sequence.tokens)
        if span.count < 1 or span.start + span.count > known or span.sample != (span.start + span.count == known):
            raise CorruptCacheError(f"a span of {span.start}+{span.count} over {known} tokens, sample={span.sample}")
        for position in range(span.start):
            if self._slots.get(self._slot(span.sequence, position)) != states[position]:
                raise CorruptCacheError(f"position {position} of {span.sequence.request_id} reads another's slot")

    def _verify_writes(self, plan: StepPlan) -> None:
        readers: dict[int, set[int]] = {}
        for index, span in enumerate(plan.spans):
            for block in span.sequence.block_table:
                readers.setdefault(block, set()).add(index)
        for index, span in enumerate(plan.spans):
            first, last = span.start // self.block_size, (span.start + span.count - 1) // self.block_size
            for block in span.sequence.block_table[first : last + 1]:
                if readers[block] != {index}:
                    raise CorruptCacheError(f"block {block} is written while another sequence holds it")
        decodes = plan.spans[: plan.decodes]
        if any(span.count != 1 or not span.sample for span in decodes):
            raise CorruptCacheError("a decode is not one token")


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
