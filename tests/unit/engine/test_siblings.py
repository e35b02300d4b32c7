"""Choices of one request: the prompt is computed once, the block in which it ends is copied before it is written."""

from __future__ import annotations

from typing import Any

import pytest

from engine.engine import Engine
from engine.plan import Sampled, StepPlan
from engine.request import ResumedChoice
from tests.support.engine_harness import Transcript, drain, make_engine, request, run, run_one
from tests.support.fake_runner import FakeRunner


def engine_of(fake: FakeRunner, **settings: Any) -> Engine:
    return make_engine(fake, **({"max_num_seqs": 8} | settings))


def prompt(length: int) -> list[int]:
    return [(7 * i) % 90 for i in range(length)]


class Recorder(FakeRunner):
    """Keeps the copies of every pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies: list[list[tuple[int, int]]] = []

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        self.copies.append(list(plan.copies))
        return super().execute(plan)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 10, 17])
def test_the_prompt_is_computed_once(length: int, caching: bool) -> None:
    fake = Recorder(64, 4)
    engine = engine_of(fake, enable_prefix_caching=caching)
    done = run_one(engine, request(prompt=prompt(length), n=3, max_tokens=2, ignore_eos=True))
    # Of the others only the last token is computed again: its logits are theirs. And each has one decode.
    assert fake.computed_tokens == length + 2 + 3
    partial = (length - 1) % 4
    assert sum(map(len, fake.copies)) == (2 if partial else 0)
    alone = run_one(
        engine_of(FakeRunner(64, 4), enable_prefix_caching=False, max_num_seqs=1),
        request(prompt=prompt(length), n=3, max_tokens=2, ignore_eos=True),
    )
    assert done.choices == alone.choices


def test_full_blocks_are_held_together_and_the_partial_one_is_not() -> None:
    fake = FakeRunner(64, 4)
    engine = engine_of(fake, enable_prefix_caching=False)
    engine.add(request(prompt=prompt(10), n=4, max_tokens=100, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.stats().running == 4
    # Two full blocks for all, and one of its own for each.
    assert engine.stats().used_blocks == 2 + 4
    engine.check()
    engine.abort("r")
    engine.check()
    assert engine.stats().used_blocks == 0


def test_a_sibling_that_comes_back_shares_the_prompt_again() -> None:
    """On a pool that is too small, choices are preempted and taken up; nothing that they say changes."""
    fake = Recorder(10, 4)
    engine = engine_of(fake, enable_prefix_caching=False, watermark=0.0, max_model_len=40)
    done = run_one(engine, request(prompt=prompt(6), n=3, max_tokens=20, seed=3, ignore_eos=True))
    assert engine.stats().preemptions > 0
    assert sum(map(len, fake.copies)) > 2
    alone = run_one(
        engine_of(FakeRunner(64, 4), enable_prefix_caching=False, max_num_seqs=1, max_model_len=40),
        request(prompt=prompt(6), n=3, max_tokens=20, seed=3, ignore_eos=True),
    )
    assert done.choices == alone.choices


def test_choices_of_different_lengths_are_taken_up_together() -> None:
    whole = run_one(
        engine_of(FakeRunner(64, 4)), request(prompt=prompt(10), n=3, max_tokens=12, seed=5, ignore_eos=True)
    )
    published = [
        ResumedChoice(index, whole.choices[index].token_ids[:count], "".join(whole.choices[index].texts[:count]))
        for index, count in ((0, 7), (2, 1))
    ]
    fake = FakeRunner(64, 4)
    engine = engine_of(fake, enable_prefix_caching=False)
    engine.add(request(prompt=prompt(10), n=3, max_tokens=12, seed=5, ignore_eos=True, resume=published))
    done = drain(engine, {"r": Transcript().resumed(published)})["r"]
    assert {i: (c.token_ids, c.text) for i, c in done.choices.items()} == {
        i: (c.token_ids, c.text) for i, c in whole.choices.items()
    }
    # The first choice computes its 17 tokens, the others share the ten of the prompt.
    computed = [(index, start) for plan in fake.plans for _, index, start, _ in plan]
    assert min(start for index, start in computed if index == 1) == 9
    assert min(start for index, start in computed if index == 2) == 10


def test_a_pass_that_fails_as_a_whole_does_not_lose_a_copy() -> None:
    class Once(Recorder):
        failed = False

        def execute(self, plan: StepPlan) -> list[Sampled | None]:
            if plan.copies and len(plan.spans) > 1 and not self.failed:
                self.failed = True
                raise RuntimeError("the pass as a whole")
            return super().execute(plan)

    fake = Once(64, 4)
    done = run(engine_of(fake), request("a", prompt(10), n=3, seed=1), request("b", [5, 6], seed=2))
    assert fake.failed
    same = run(engine_of(FakeRunner(64, 4)), request("a", prompt(10), n=3, seed=1), request("b", [5, 6], seed=2))
    assert {name: each.choices for name, each in done.items()} == {name: each.choices for name, each in same.items()}


def test_a_request_is_counted_once_in_the_hit_rate() -> None:
    engine = engine_of(FakeRunner(64, 4))
    run_one(engine, request("a", prompt(13), n=3))
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prefix_hit_rate) == (13, 0, 0.0)
    done = run_one(engine, request("b", prompt(13), n=3))
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (26, 12)
    assert stats.prefix_hit_rate == pytest.approx(12 / 26)
    assert done.last is not None
    assert done.last.usage.cached_tokens == 12


def test_reading_the_cache_can_be_switched_off_per_request() -> None:
    fake = FakeRunner(64, 4)
    engine = engine_of(fake)
    run_one(engine, request("a", prompt(13), ignore_eos=True, max_tokens=1))
    before = fake.computed_tokens
    done = run_one(engine, request("b", prompt(13), ignore_eos=True, max_tokens=1, skip_reading_prefix_cache=True))
    assert fake.computed_tokens - before == 13
    assert done.last is not None
    assert done.last.usage.cached_tokens == 0
    assert engine.stats().prefix_query_tokens == 13
    # It still leaves its blocks to others.
    other = run_one(engine, request("c", [*prompt(13), 3, 3, 3, 3], ignore_eos=True, max_tokens=1))
    assert other.last is not None
    assert other.last.usage.cached_tokens == 12


def test_two_that_skip_the_cache_do_not_wait_for_each_other() -> None:
    fake = FakeRunner(64, 4)
    engine = engine_of(fake)
    for name in "ab":
        engine.add(request(name, prompt(13), ignore_eos=True, max_tokens=1, skip_reading_prefix_cache=True))
    engine.step()
    assert fake.computed_tokens == 26
    assert not engine.has_work()


def test_a_copy_of_a_copy_is_made_from_the_original() -> None:
    """Two choices come back in one pass, beside one that has computed the prompt and no more."""
    fields: dict[str, Any] = {"n": 3, "max_tokens": 14, "ignore_eos": True}
    whole = run_one(make_engine(), request(prompt=prompt(6), **fields)).choices
    fake = Recorder(9, 4)
    engine = engine_of(fake, watermark=0.0)
    engine.add(request("other", [9] * 15, max_tokens=2, ignore_eos=True))
    transcripts = {"other": Transcript()}
    for output in engine.step():
        transcripts[output.request_id].take(output)
    published = [ResumedChoice(0, whole[0].token_ids[:12], ""), ResumedChoice(2, whole[2].token_ids[:1], "")]
    engine.add(request("r", prompt(6), resume=published, **fields))
    transcripts["r"] = Transcript().resumed(published)
    done = drain(engine, transcripts)["r"]
    assert {i: c.token_ids for i, c in done.choices.items()} == {i: c.token_ids for i, c in whole.items()}
    assert any(len(copies) == 2 and copies[0][0] == copies[1][0] for copies in fake.copies)
