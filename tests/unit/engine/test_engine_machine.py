"""The engine under random traffic: nothing leaks, everything ends, and nobody's tokens depend on the crowd."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.request import EngineRequest, StepOutput
from shared.errors import ContextLengthExceededError
from tests.support import tiny_tokenizer as tiny
from tests.support.engine_harness import Choice, Transcript, drain, make_engine, request, run_one
from tests.support.fake_runner import FakeRunner

#: Prompts share prefixes of different lengths, so that the cache has something to find and something to confuse.
STEMS = [[1] * 40, [1] * 8 + [2] * 32, [3, 4] * 20]

items = st.fixed_dictionaries(
    {
        "stem": st.integers(0, len(STEMS) - 1),
        "length": st.integers(1, 40),
        "tail": st.lists(st.integers(0, 3), max_size=2),
    },
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.one_of(st.none(), st.integers(1, 30)),
        "priority": st.integers(0, 2),
        "adapter": st.sampled_from(["a", "b"]),
        "cache_salt": st.sampled_from(["s", "t"]),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from(["a", "DEF", "\ufffd"]),
        "min_tokens": st.just(1),
    },
)


@lru_cache(maxsize=4096)
def _undisturbed(key: str, prompt: tuple[int, ...], max_len: int, fields: tuple[tuple[str, Any], ...]) -> Transcript:
    engine = make_engine(
        FakeRunner(num_blocks=256, block_size=8), enable_prefix_caching=False, max_model_len=max_len, max_num_seqs=16
    )
    return run_one(engine, request(key, list(prompt), **dict(fields)))


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps and aborts in any order, on pools and budgets that are often far too small."""

    @initialize(
        blocks=st.integers(2, 24),
        size=st.sampled_from([1, 3, 4, 8]),
        seqs=st.integers(1, 6),
        budget=st.integers(0, 20),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1, 0.5]),
        lookahead=st.integers(0, 3),
        bypasses=st.integers(0, 3),
    )
    def build(self, blocks: int, size: int, seqs: int, budget: int, caching: bool, watermark: float, lookahead: int,
              bypasses: int) -> None:  # fmt: skip
        self.runner = FakeRunner(blocks, size)
        self.room = blocks * size
        self.engine = make_engine(
            self.runner,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + budget,
            max_model_len=64,
            enable_prefix_caching=caching,
            watermark=watermark,
            lookahead=lookahead,
            max_bypasses=bypasses,
        )
        self.count = 0
        self.live: dict[str, tuple[EngineRequest, tuple[tuple[str, Any], ...]]] = {}
        self.transcripts: dict[str, Transcript] = {}

    @rule(item=items)
    def add(self, item: dict[str, Any]) -> None:
        fields = dict(item)
        prompt = [*STEMS[fields.pop("stem")][: fields.pop("length")], *fields.pop("tail")]
        fields.setdefault("max_tokens", 16)
        self.count += 1
        added = request(str(self.count), prompt, **fields)
        try:
            self.engine.add(added)
        except ContextLengthExceededError:
            wanted = len(prompt) + (fields["max_tokens"] or 1)
            assert min(wanted, 64) > self.room or len(prompt) >= min(64, self.room)
            return
        plain = {name: value for name, value in fields.items() if name not in ("priority", "cache_salt")}
        self.live[added.id] = added, tuple(sorted(plain.items()))
        self.transcripts[added.id] = Transcript()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            had_work = self.engine.has_work()
            outputs = self.engine.step()
            self.engine.check()
            assert had_work or not outputs
            for output in outputs:
                self.take(output)

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        output = self.engine.abort(name)
        self.engine.check()
        assert output is not None
        self.transcripts[name].take(output)
        expected = self.expected(name)
        for index, choice in self.transcripts[name].choices.items():
            whole = expected.choices[index]
            assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
            if choice.finish_reason != "abort":
                assert choice == whole
        del self.live[name]

    @rule(priority=st.integers(0, 2))
    def capacity(self, priority: int) -> None:
        capacity = self.engine.capacity(priority)
        assert 0 <= capacity.tokens <= self.room
        assert capacity.sequences >= 0
        if priority:
            above = self.engine.capacity(priority - 1)
            assert above.tokens >= capacity.tokens
            assert above.sequences >= capacity.sequences

    def take(self, output: StepOutput) -> None:
        transcript = self.transcripts[output.request_id]
        transcript.take(output)
        assert output.error is None
        if output.finished:
            self.compare(output.request_id)

    def compare(self, name: str) -> None:
        expected, got = self.expected(name), self.transcripts[name]
        assert expected.last is not None
        assert got.last is not None
        assert {i: _said(c) for i, c in got.choices.items()} == {i: _said(c) for i, c in expected.choices.items()}
        assert got.last.usage.completion_tokens == expected.last.usage.completion_tokens
        assert got.last.usage.prompt_tokens == expected.last.usage.prompt_tokens
        assert got.last.usage.cached_tokens < got.last.usage.prompt_tokens
        del self.live[name]

    def expected(self, name: str) -> Transcript:
        added, fields = self.live[name]
        return _undisturbed("x", tuple(added.prompt_token_ids), min(64, self.room), fields)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        drain(self.engine, self.transcripts)
        for name in list(self.live):
            self.compare(name)
        stats = self.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


def _said(choice: Choice) -> tuple[list[int], str, str | None, str | int | None]:
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def test_the_machine_meets_what_it_is_for() -> None:
    """One fixed case that preempts, chunks, hits the cache and passes a big one, so that the above is not vacuous."""
    fake = FakeRunner(12, 4)
    engine = make_engine(fake, max_num_seqs=4, max_num_batched_tokens=10, max_model_len=48, watermark=0.0)
    added = [request(str(i), STEMS[i % 3][: 9 + i], max_tokens=30, seed=i, priority=i % 3) for i in range(9)]
    for item in added:
        engine.add(item)
    done = drain(engine)
    stats = engine.stats()
    assert stats.preemptions > 3
    assert stats.prefix_hit_tokens > 0
    assert any(count > 1 and start > 0 for plan in fake.plans for _, _, start, count in plan)
    for item in added:
        fields = (("max_tokens", 30), ("seed", item.params.seed))
        expected = _undisturbed("x", tuple(item.prompt_token_ids), 48, fields)
        assert done[item.id].choices == expected.choices
    assert tiny.EOS in {choice.token_ids[-1] for t in done.values() for choice in t.choices.values()}
