"""The engine under random traffic: nothing leaks, everything ends, and nobody's tokens depend on the crowd."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.config import SchedulerConfig
from engine.request import StepOutput
from shared.errors import ContextLengthExceededError
from tests.support import tiny_tokenizer as tiny
from tests.support.engine_harness import (
    Choice,
    Transcript,
    check_empty,
    check_pass,
    drain,
    make_engine,
    request,
    run_one,
)
from tests.support.fake_runner import FakeRunner, Fault, FaultyRunner

#: Prompts share prefixes of different lengths, so that the cache has something to find and something to confuse.
STEMS = [[1] * 40, [1] * 8 + [2] * 32, [3, 4] * 20]
CONTEXT = 64
FAULTS: list[Fault] = ["error", "raise", "token", "silent"]

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
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "skip_reading_prefix_cache": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([-1, 1, 9]),
    },
)
schedulers = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "enable_prefix_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1, 0.5]),
        "lookahead": st.integers(0, 3),
        "max_bypasses": st.integers(0, 3),
        "long_prefill_token_threshold": st.sampled_from([0, 1, 3, 8]),
        "batch_prefill_tokens": st.sampled_from([0, 1, 5, 20]),
    }
)


@pytest.fixture(autouse=True)
def no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the faults that the tests make."""
    monkeypatch.setattr(logging.getLogger("engine.engine"), "disabled", True)


@lru_cache(maxsize=4096)
def _undisturbed(prompt: tuple[int, ...], max_len: int, fields: tuple[tuple[str, Any], ...]) -> Transcript:
    engine = make_engine(
        FakeRunner(num_blocks=256, block_size=8), enable_prefix_caching=False, max_model_len=max_len, max_num_seqs=16
    )
    return run_one(engine, request("x", list(prompt), **dict(fields)))


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, moves and faults in any order, on pools and budgets that are often far too small.

    Two engines of one KV cache size, so that a request may be taken up by the other one.
    """

    @initialize(
        blocks=st.integers(2, 24),
        size=st.sampled_from([1, 3, 4, 8]),
        configs=st.tuples(schedulers, schedulers),
        budgets=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    )
    def build(
        self, blocks: int, size: int, configs: tuple[dict[str, Any], dict[str, Any]], budgets: tuple[int, int]
    ) -> None:
        self.room = min(CONTEXT, blocks * size)
        self.runners = [FaultyRunner(blocks, size) for _ in configs]
        self.configs = [
            SchedulerConfig(**config, max_num_batched_tokens=config["max_num_seqs"] + budget, max_model_len=CONTEXT)
            for config, budget in zip(configs, budgets, strict=True)
        ]
        self.engines = [
            make_engine(runner, **{name: getattr(config, name) for name in SchedulerConfig.__slots__})
            for runner, config in zip(self.runners, self.configs, strict=True)
        ]
        self.count = 0
        self.live: dict[str, tuple[int, tuple[tuple[str, Any], ...]]] = {}  # by id: which engine, fields
        self.transcripts: dict[str, Transcript] = {}
        self.moved: set[str] = set()

    @rule(item=items, where=st.integers(0, 1))
    def add(self, item: dict[str, Any], where: int) -> None:
        fields = dict(item)
        prompt = [*STEMS[fields.pop("stem")][: fields.pop("length")], *fields.pop("tail")]
        fields.setdefault("max_tokens", 16)
        self.count += 1
        added = request(str(self.count), prompt, **fields)
        try:
            self.engines[where].add(added)
        except ContextLengthExceededError:
            output = fields["max_tokens"] or 1
            keep = fields.get("truncate_prompt_tokens", CONTEXT)
            length = min(len(prompt), max(1, self.room - output) if keep == -1 else keep)
            assert length >= self.room or min(length + output, CONTEXT) > self.room
            return
        plain = {name: value for name, value in fields.items() if name not in ("priority", "cache_salt")}
        self.live[added.id] = where, tuple(sorted(plain.items()))
        self.transcripts[added.id] = Transcript(item=added)

    @rule(count=st.integers(1, 6), where=st.integers(0, 1))
    def step(self, count: int, where: int) -> None:
        engine = self.engines[where]
        for _ in range(count):
            had_work = engine.has_work()
            outputs = engine.step()
            engine.check()
            check_pass(self.runners[where], self.configs[where])
            assert had_work or not outputs
            for output in outputs:
                self.take(output)

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.take(self._end(name))

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), where=st.integers(0, 1))
    def move(self, data: st.DataObject, where: int) -> None:
        """What was published goes on here or there."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        again = self.transcripts[name].take_up()
        self._end(name)
        self.live[name] = where, self.live[name][1]
        self.moved.add(name)
        self.engines[where].add(again)
        self.engines[where].check()

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), fault=st.sampled_from(FAULTS))
    def spoil(self, data: st.DataObject, fault: Fault) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.runners[self.live[name][0]].guilty[name] = fault

    @rule(where=st.integers(0, 1), when=st.sampled_from(["before", "behind"]))
    def break_a_pass(self, where: int, when: Literal["before", "behind"]) -> None:
        """A pass fails as a whole: its spans run one by one, and nobody is guilty."""
        self.runners[where].breaks = when

    @rule(priority=st.integers(0, 2), where=st.integers(0, 1))
    def capacity(self, priority: int, where: int) -> None:
        engine = self.engines[where]
        capacity = engine.capacity(priority)
        assert 0 <= capacity.tokens <= engine.stats().total_blocks * self.runners[where].block_size
        assert capacity.sequences >= 0
        if priority:
            above = engine.capacity(priority - 1)
            assert above.tokens >= capacity.tokens
            assert above.sequences >= capacity.sequences

    def take(self, output: StepOutput) -> None:
        transcript = self.transcripts[output.request_id]
        transcript.take(output)
        if output.finished:
            self._compare(output.request_id)
            del self.live[output.request_id]

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        for engine in self.engines:
            while engine.has_work():
                for output in engine.step():
                    self.take(output)
                engine.check()
            check_empty(engine)
        assert not self.live

    def _end(self, name: str) -> StepOutput:
        engine = self.engines[self.live[name][0]]
        output = engine.abort(name)
        engine.check()
        assert output is not None
        assert output.finished
        assert engine.abort(name) is None
        return output

    def _compare(self, name: str) -> None:
        """With what the request gives alone: the whole of it, or what came before it failed or was aborted."""
        where, fields = self.live[name]
        got = self.transcripts[name]
        assert got.last is not None
        assert got.item is not None
        expected = _undisturbed(tuple(got.item.prompt_token_ids), self.room, fields)
        assert expected.last is not None
        guilty = name in self.runners[where].guilty
        assert guilty or got.last.error is None
        ended = {choice.finish_reason for choice in got.choices.values()}
        if not ended & {"abort", "error"}:
            assert {i: _said(c) for i, c in got.choices.items()} == {i: _said(c) for i, c in expected.choices.items()}
            assert got.prompt_logprobs == expected.prompt_logprobs
            assert got.last.usage.completion_tokens == expected.last.usage.completion_tokens
        for index, choice in got.choices.items():
            whole = expected.choices[index]
            if choice.finish_reason in ("abort", "error"):
                assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
                assert choice.logprobs == whole.logprobs[: len(choice.logprobs)]
            else:
                assert _said(choice) == _said(whole)
        assert got.prompt_logprobs == expected.prompt_logprobs[: len(got.prompt_logprobs)]
        usage = got.last.usage
        assert usage.prompt_tokens == expected.last.usage.prompt_tokens
        assert usage.cached_tokens <= usage.prompt_tokens
        # One that was taken up may have nothing left to score, and then reads the cache as others do.
        if got.item.params.skip_reading_prefix_cache or (got.prompt_logprobs and name not in self.moved):
            assert not usage.cached_tokens


def _said(choice: Choice) -> tuple[Any, ...]:
    return choice.token_ids, choice.text, choice.logprobs, choice.finish_reason, choice.stop_reason


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
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
        expected = _undisturbed(tuple(item.prompt_token_ids), 48, fields)
        assert done[item.id].choices == expected.choices
    assert tiny.EOS in {choice.token_ids[-1] for t in done.values() for choice in t.choices.values()}
