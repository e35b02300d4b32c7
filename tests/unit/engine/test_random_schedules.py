"""Ten thousand small engines under random schedules: no block leaks, nobody starves, every request ends once."""

from __future__ import annotations

import logging
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from engine.adapters.library import AdapterLibrary
from engine.adapters.weights import Adapter
from engine.config import SchedulerConfig
from engine.detokenizer import Detokenizer
from engine.engine import Engine
from engine.request import EngineRequest, ResumedChoice
from shared.errors import ContextLengthExceededError
from tests.support.engine_harness import (
    LateExecutor,
    Transcript,
    adapters,
    check_empty,
    check_pass,
    make_engine,
    request,
)
from tests.support.fake_runner import Fault, FaultyRunner, LaunchingRunner, hashed
from tests.support.tiny_tokenizer import EOS

SEEDS_PER_TEST = 1_000
CONTEXT = 32
FAULTS: tuple[Fault, ...] = ("error", "raise", "token", "silent")
ACTIONS = {"add": 6, "step": 9, "abort": 1, "move": 1, "spoil": 0.3, "break": 1, "keep": 0.7}
KINDS = (
    "preemptions", "hits", "copies", "scored", "aborts", "moves", "resumed", "failed", "refused", "refilled", "unread",
    "unfit", "kept",
)  # fmt: skip
ADAPTERS = ("a", "b", "c", "d", "broken")
STOP_IDS = list(range(0, EOS, 7))


class Schedule:
    """One engine and what happens to it, all drawn from one seed.

    Attributes:
        seen: how often each kind of event came up.
    """

    def __init__(self, seed: int, kind: type[FaultyRunner] = FaultyRunner) -> None:
        self._rng = rng = random.Random(seed)
        size = rng.choice((1, 2, 3, 4))
        self._runner = kind(rng.randint(12, 40) // size, size)
        seqs = rng.randint(1, 5)
        self._config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + rng.choice((0, 1, 3, 9)),
            max_model_len=CONTEXT,
            long_prefill_token_threshold=rng.choice((0, 0, 1, 4)),
            batch_prefill_tokens=random.Random(f"classes {seed}").choice((0, 0, 1, 3, 12)),
            enable_prefix_caching=rng.random() < 0.7,
            watermark=rng.choice((0.0, 0.0, 0.1, 0.4)),
            lookahead=rng.randint(0, 3),
            max_bypasses=rng.randint(0, 3),
            output_reserve=rng.choice((0, 4, 256)),
            max_loras=rng.randint(1, 3),
        )
        self._reads = LateExecutor()
        self._memory = rng.randint(1, 4)
        self._pinned: set[str] = set()
        self._retired: set[str] = set()
        self.engine = _engine(self._runner, self._config, adapters(ADAPTERS, self._memory, self._reads))
        if rng.random() < 0.4:
            self._runner.unfit = {"d"}
        self._transcripts: dict[str, Transcript] = {}
        self._live: dict[str, Transcript] = {}
        self._preemptions = 0
        self.seen: Counter[str] = Counter()

    def play(self) -> None:
        """A dozen actions, then steps until nothing is left."""
        rng = self._rng
        for action in rng.choices(list(ACTIONS), list(ACTIONS.values()), k=rng.randint(6, 15)):
            if action == "add":
                self._add()
            elif action == "step":
                for _ in range(rng.randint(1, 4)):
                    if self.engine.has_work():
                        self._step()
            elif action == "keep":
                self._keep()
            elif self._live:
                getattr(self, f"_{action}")(rng.choice(list(self._live)))
        # In every step the first in rank gets on, and only a higher class takes its place: see `Scheduler`.
        # An adapter is read in the step after it is wanted at the latest, and there is room for one at least.
        # Those that are pinned are read with no request, too.
        for _ in range(3 * sum(CONTEXT * t.item.params.n for t in self._live.values() if t.item is not None) + 40):
            if not self.engine.has_work():
                break
            self._step()
        assert not self._live, f"starved: {sorted(self._live)}"
        assert not self.engine.has_work()
        check_empty(self.engine)
        if isinstance(self._runner, LaunchingRunner):
            runner = self._runner
            dropped = runner.launched - runner.landed
            self.seen += Counter(launched=runner.launched, late=runner.late, behind=runner.behind, dropped=dropped)
        stats = self.engine.stats()
        there = {*stats.adapters.resident, *stats.adapters.in_memory}
        assert not there & self._retired - self._pinned, "an adapter that was to leave is still there"
        assert len(stats.adapters.in_memory) <= self._memory
        assert stats.preemptions == self._preemptions, "a preemption is in nobody's account"
        self.seen += Counter(
            requests=len(self._transcripts),
            preemptions=stats.preemptions,
            hits=stats.prefix_hit_tokens,
            copies=self._runner.copied,
            refilled=len(self._runner.fills) - len(self._runner.slots),
        )

    def _add(self) -> None:
        rng = self._rng
        stem = rng.choice(([5] * 20, [5] * 6 + [6] * 14))
        fields: dict[str, Any] = {
            "n": rng.choice((1, 1, 2, 3)),
            "max_tokens": rng.randint(1, 9),
            "seed": rng.randint(0, 99),
            "priority": rng.choice((0, 1, 1, 1, 2)),
            "adapter": rng.choice((None, None, None, None, None, "a", "a", "b", "c", "d", "broken")),
            "cache_salt": rng.choice((None, None, None, "s")),
            "prompt_logprobs": rng.choice((None, None, None, 0, 2)),
            "skip_reading_prefix_cache": rng.choice((None, None, None, True)),
            "stop_token_ids": rng.choice((None, None, STOP_IDS)),
            "ignore_eos": rng.random() < 0.3,
        }
        if isinstance(self._runner, LaunchingRunner) and rng.random() < 0.15:
            self._runner.hosts.add(str(len(self._transcripts)))
        item = request(str(len(self._transcripts)), [*stem[: rng.randint(0, 18)], rng.randint(0, 2)], **fields)
        if rng.random() < 0.2:
            self._begin_elsewhere(item)
        try:
            self.engine.add(item)
        except ContextLengthExceededError:
            room = self._runner.num_blocks * self._runner.block_size
            assert len(item.prompt_token_ids) + fields["max_tokens"] > room
            self.seen["refused"] += 1
            return
        self._transcripts[item.id] = self._live[item.id] = Transcript(item=item).resumed(item.resume)

    def _begin_elsewhere(self, item: EngineRequest) -> None:
        """Its choices come with any number of their ids, up to all of them, as if another worker had died."""
        item.params.prompt_logprobs = None
        for index in self._rng.sample(range(item.params.n), self._rng.randint(1, item.params.n)):
            ids, _ = _expected(item, index)
            item.resume.append(ResumedChoice(index, ids[: self._rng.randint(0, len(ids))], ""))
            self.seen["resumed"] += 1

    def _step(self) -> None:
        passes, quiet = len(self._runner.plans), bool(self._reads.waiting) or self.engine._flight is not None
        while self._reads.waiting and self._rng.random() < 0.7:
            self._reads.run(self._rng.randrange(len(self._reads.waiting)))
        outputs = self.engine.step()
        self.engine.check()
        check_pass(self._runner, self._config)
        assert quiet or outputs or len(self._runner.plans) > passes, "a step that did nothing"
        for output in outputs:
            transcript = self._live[output.request_id]
            transcript.take(output)
            if output.finished:
                self._end(output.request_id)

    def _keep(self) -> None:
        """Some adapters are pinned, and others unloaded."""
        self._pinned, self._retired = (set(self._rng.sample(ADAPTERS, self._rng.randint(0, 3))) for _ in range(2))
        self.engine.keep_adapters(dict.fromkeys(sorted(self._pinned), ""), self._retired)
        self.engine.check()
        self.seen["kept"] += 1

    def _abort(self, name: str) -> None:
        output = self.engine.abort(name)
        self.engine.check()
        assert output is not None
        self._live[name].take(output)
        self._end(name)
        self.seen["aborts"] += 1

    def _move(self, name: str) -> None:
        """Its worker is gone, and another takes up what was published."""
        again = self._live[name].take_up()
        output = self.engine.abort(name)
        assert output is not None
        self._preemptions += output.preemptions
        self.engine.add(again)
        self.engine.check()
        self.seen["moves"] += 1

    def _spoil(self, name: str) -> None:
        self._runner.guilty[name] = self._rng.choice(FAULTS)

    def _break(self, _: str) -> None:
        self._runner.breaks = self._rng.choice(("before", "behind"))

    def _end(self, name: str) -> None:
        """All that was said is what the request's own tokens give."""
        transcript = self._live.pop(name)
        item, last = transcript.item, transcript.last
        assert item is not None
        assert last is not None
        spoilt = name in self._runner.guilty or item.adapter == "broken" or item.adapter in self._runner.unfit
        assert last.error is None or spoilt
        self.seen["unread"] += last.error is not None and item.adapter == "broken"
        self.seen["unfit"] += last.error is not None and item.adapter in self._runner.unfit
        self._preemptions += last.preemptions
        self.seen["failed"] += last.error is not None
        for index, choice in transcript.choices.items():
            ids, reason = _expected(item, index)
            if choice.finish_reason in ("abort", "error"):
                assert choice.token_ids == ids[: len(choice.token_ids)]
            else:
                assert (choice.token_ids, choice.finish_reason) == (ids, reason)
        assert last.usage.prompt_tokens == len(item.prompt_token_ids)
        assert last.usage.completion_tokens == sum(len(choice.token_ids) for choice in transcript.choices.values())
        self.seen["scored"] += len(transcript.prompt_logprobs)


def _engine(runner: FaultyRunner, config: SchedulerConfig, library: AdapterLibrary[Adapter]) -> Engine:
    return make_engine(runner, library, **{name: getattr(config, name) for name in SchedulerConfig.__slots__})


def _expected(item: EngineRequest, index: int) -> tuple[list[int], str]:
    params = item.params
    tokens, ends = list(item.prompt_token_ids), set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ends.add(EOS)
    while True:
        tokens.append(hashed(item.adapter, params.seed or 0, index, tokens))
        output = tokens[len(item.prompt_token_ids) :]
        if output[-1] in ends:
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) == CONTEXT:
            return output, "length"


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback of the faults that are made; the tokenizer's tables are made once."""
    for name in ("engine.engine", "engine.passes", "engine.adapters.library"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    monkeypatch.setattr("engine.engine.Detokenizer", cache(Detokenizer))
    monkeypatch.setattr("engine.engine._ADAPTER_WAIT_S", 0.0)


@pytest.mark.parametrize("first", range(0, 10_000, SEEDS_PER_TEST))
def test_random_schedules(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        schedule = Schedule(seed)
        try:
            schedule.play()
        except BaseException as error:
            error.add_note(f"Schedule({seed}).play() shows it again")
            raise
        seen += schedule.seen
    # What the schedules are for comes up in every thousand of them.
    assert seen["requests"] > 2 * SEEDS_PER_TEST
    assert not [kind for kind in KINDS if seen[kind] < 50]


@pytest.mark.parametrize("first", range(0, 2_000, SEEDS_PER_TEST))
def test_random_schedules_ahead_of_the_device(first: int) -> None:
    """The same, where each pass begins before the tokens of the last one are known."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        schedule = Schedule(seed, LaunchingRunner)
        try:
            schedule.play()
        except BaseException as error:
            error.add_note(f"Schedule({seed}, LaunchingRunner).play() shows it again")
            raise
        seen += schedule.seen
    assert seen["requests"] > 2 * SEEDS_PER_TEST
    assert not [kind for kind in (*KINDS, "launched", "late", "behind", "dropped") if seen[kind] < 50]
