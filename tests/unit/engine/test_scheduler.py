"""Scheduling policy: budgets, admission, look-ahead, ageing, classes, preemption, shared prefixes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.engine import Engine
from tests.support.engine_harness import make_engine, request, run, run_one
from tests.support.fake_runner import FakeRunner, scripted

FOREVER = scripted([65] * 1000, [66] * 1000, [67] * 1000)


def runner(blocks: int = 64, size: int = 4) -> FakeRunner:
    """A runner whose choices never say EOS."""
    return FakeRunner(blocks, size, next_token=FOREVER)


def prompt(length: int, first: int = 0) -> list[int]:
    """A prompt that shares no first block with one of another `first`."""
    return [first, *([9] * (length - 1))]


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.check()


def run_out(engine: Engine) -> None:
    for _ in range(1000):
        if not engine.has_work():
            return
        steps(engine, 1)
    raise AssertionError("the engine does not get to an end")


def test_decodes_come_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    fake = runner()
    engine = make_engine(fake, max_num_seqs=4, max_num_batched_tokens=8)
    engine.add(request("a", prompt(3), max_tokens=12))
    steps(engine, 1)
    engine.add(request("b", prompt(20, 1), max_tokens=2))
    steps(engine, 3)
    assert fake.plans == [
        [("a", 0, 0, 3)],
        [("a", 0, 3, 1), ("b", 0, 0, 7)],
        [("a", 0, 4, 1), ("b", 0, 7, 7)],
        [("a", 0, 5, 1), ("b", 0, 14, 6)],
    ]


def test_a_long_prompt_never_stops_a_running_stream() -> None:
    fake = runner(blocks=400, size=4)
    engine = make_engine(fake, max_num_seqs=4, max_num_batched_tokens=16)
    engine.add(request("stream", prompt(3), max_tokens=100))
    steps(engine, 2)
    engine.add(request("long", prompt(400, 1), max_tokens=1))
    while engine.stats().running < 2 or any(plan[-1][0] == "long" for plan in fake.plans[-1:]):
        outputs = {output.request_id for output in engine.step()}
        assert "stream" in outputs
        assert sum(count for *_, count in fake.plans[-1]) <= 16
        if len(fake.plans) > 60:
            break
    assert sum(count for plan in fake.plans for name, *_, count in plan if name == "long") == 400


def test_a_prompt_is_cut_the_same_way_whatever_the_chunk() -> None:
    whole = run_one(make_engine(FakeRunner(), max_num_batched_tokens=256), request(prompt=prompt(200), max_tokens=20))
    halves = run_one(
        make_engine(FakeRunner(), max_num_seqs=4, max_num_batched_tokens=100),
        request(prompt=prompt(200), max_tokens=20),
    )
    assert whole.choices == halves.choices


@pytest.mark.parametrize("chunk", [3, 5, 7, 100])
def test_keys_of_blocks_depend_on_absolute_tokens_only(chunk: int) -> None:
    fake = FakeRunner(200, 4)
    engine = make_engine(fake, max_num_seqs=2, max_num_batched_tokens=chunk)
    run_one(engine, request("cold", prompt(150), max_tokens=1))
    warm = run_one(engine, request("warm", prompt(150), max_tokens=1))
    assert warm.last is not None
    assert warm.last.usage.cached_tokens == 148


def test_a_block_is_cached_only_when_it_is_full() -> None:
    fake = FakeRunner(64, 8)
    engine = make_engine(fake, max_num_seqs=2, max_num_batched_tokens=5)
    engine.add(request("a", prompt(40), max_tokens=1))
    steps(engine, 3)
    engine.abort("a")
    assert engine.stats().cached_blocks == 1  # 15 tokens computed, blocks of 8
    again = run_one(engine, request("b", prompt(40), max_tokens=1))
    assert again.last is not None
    assert again.last.usage.cached_tokens == 8


@pytest.mark.parametrize("length", [8, 9, 5, 1])
def test_the_last_token_is_always_computed_again(length: int) -> None:
    fake = FakeRunner(64, 4)
    engine = make_engine(fake)
    first = run_one(engine, request("a", prompt(length), max_tokens=3, ignore_eos=True))
    second = run_one(engine, request("b", prompt(length), max_tokens=3, ignore_eos=True))
    assert first.choices == second.choices
    assert second.last is not None
    assert second.last.usage.cached_tokens == (length - 1) // 4 * 4
    assert fake.plans[-3][0][3] >= 1


def test_adapters_and_salts_share_nothing() -> None:
    fake = FakeRunner(200, 4)
    engine = make_engine(fake)
    owners: list[dict[str, Any]] = [
        {},
        {"adapter": "a"},
        {"adapter": "b"},
        {"cache_salt": "a"},
        {"adapter": "a", "cache_salt": "a"},
    ]
    for index, owner in enumerate(owners):
        transcript = run_one(engine, request(str(index), prompt(30), max_tokens=1, **owner))
        assert transcript.last is not None
        assert transcript.last.usage.cached_tokens == 0
    for index, owner in enumerate(owners):
        transcript = run_one(engine, request(f"again {index}", prompt(30), max_tokens=1, **owner))
        assert transcript.last is not None
        assert transcript.last.usage.cached_tokens == 28


def test_choices_of_one_request_compute_their_prompt_once() -> None:
    fake = runner()
    engine = make_engine(fake, max_num_seqs=4, max_num_batched_tokens=64)
    run_one(engine, request("r", prompt(41), n=3, max_tokens=1))
    assert fake.computed_tokens == 41 + 1 + 1
    assert [[(choice, start) for _, choice, start, _ in plan] for plan in fake.plans] == [[(0, 0)], [(1, 40), (2, 40)]]


def test_without_prefix_cache_nothing_is_left_of_a_choice_that_has_ended() -> None:
    """Choices share with one that runs: see `test_siblings`. Here each ends with its first token."""
    fake = runner()
    run_one(make_engine(fake, enable_prefix_caching=False), request("r", prompt(41), n=3, max_tokens=1))
    assert fake.computed_tokens == 3 * 41


def test_a_burst_with_one_system_prompt_computes_it_once() -> None:
    fake = runner()
    engine = make_engine(fake, max_num_seqs=8, max_num_batched_tokens=512)
    run(engine, *(request(str(i), [*prompt(40), 100 + i], max_tokens=1) for i in range(5)))
    assert fake.computed_tokens == 41 + 4


def test_one_does_not_wait_for_the_prefix_of_a_lower_class() -> None:
    fake = runner()
    engine = make_engine(fake, max_num_seqs=8, max_num_batched_tokens=8)
    engine.add(request("batch", prompt(40), max_tokens=1, priority=2))
    steps(engine, 1)
    engine.add(request("chat", prompt(20), max_tokens=1, priority=0))
    steps(engine, 1)
    assert fake.plans[-1][0] == ("chat", 0, 8, 8)


def test_of_two_long_prompts_one_waits_until_all_of_it_fits() -> None:
    fake = runner(blocks=15)  # 60 tokens: one and a half prompts of 40
    engine = make_engine(fake, max_num_seqs=4, max_num_batched_tokens=16)
    engine.add(request("a", prompt(40), max_tokens=8))
    engine.add(request("b", prompt(40, 1), max_tokens=8))
    steps(engine, 1)
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    run_out(engine)
    assert engine.stats().generated_tokens == 16
    assert engine.stats().preemptions == 0


def test_a_small_request_passes_one_that_does_not_fit() -> None:
    fake = runner(blocks=20)
    engine = make_engine(fake, max_num_seqs=4, watermark=0.0)
    engine.add(request("running", prompt(40), max_tokens=30))
    steps(engine, 1)
    engine.add(request("big", prompt(60, 1), max_tokens=1))
    engine.add(request("small", prompt(4, 2), max_tokens=1))
    assert [output.request_id for output in engine.step()] == ["running", "small"]


def test_one_that_does_not_fit_is_not_passed_for_ever() -> None:
    fake = runner(blocks=20)
    engine = make_engine(fake, max_num_seqs=4, watermark=0.0, max_bypasses=3)
    engine.add(request("running", prompt(30), max_tokens=40))
    steps(engine, 1)
    engine.add(request("big", prompt(60, 1), max_tokens=1))
    for index in range(60):
        engine.add(request(f"small {index}", prompt(4, 2), max_tokens=4))
    order: list[str] = []
    while engine.has_work():
        order += [output.request_id for output in engine.step() if output.started]
        engine.check()
    assert order.index("big") == 3, order[:6]


def test_look_ahead_is_bounded() -> None:
    fake = runner(blocks=20)
    engine = make_engine(fake, max_num_seqs=8, watermark=0.0, lookahead=2)
    engine.add(request("running", prompt(40), max_tokens=30))
    steps(engine, 1)
    for index in range(3):
        engine.add(request(f"big {index}", prompt(60, 1 + index), max_tokens=1))
    engine.add(request("small", prompt(4, 7), max_tokens=1))
    assert [output.request_id for output in engine.step()] == ["running"]


def test_the_newest_of_the_lowest_class_is_preempted_and_returns_first() -> None:
    fake = runner(blocks=12)
    engine = make_engine(fake, max_num_seqs=4, watermark=0.0)
    engine.add(request("high", prompt(8), max_tokens=28, priority=0))
    engine.add(request("old", prompt(8, 1), max_tokens=20, priority=2))
    engine.add(request("new", prompt(8, 2), max_tokens=20, priority=2))
    order: list[str] = []
    resumed: list[str] = []
    while engine.has_work():
        before = engine.stats().preemptions
        outputs = engine.step()
        engine.check()
        if engine.stats().preemptions > before:
            order += sorted({"high", "old", "new"} - {output.request_id for output in outputs})[:1]
            engine.add(request(f"late {before}", prompt(4, 3), max_tokens=2, priority=2))
        resumed += [output.request_id for output in outputs if output.started]
    assert order[0] == "new"
    assert engine.stats().preemptions >= 1
    assert resumed[:3] == ["high", "old", "new"]


def test_a_preempted_sequence_keeps_its_tokens() -> None:
    big = run(make_engine(FakeRunner(200, 4)), *(request(str(i), prompt(9, i), max_tokens=40) for i in range(5)))
    engine = make_engine(FakeRunner(16, 4), max_num_seqs=5, max_num_batched_tokens=8, watermark=0.0)
    small = run(engine, *(request(str(i), prompt(9, i), max_tokens=40) for i in range(5)))
    assert engine.stats().preemptions > 0
    assert {name: t.choices for name, t in small.items()} == {name: t.choices for name, t in big.items()}
    finals = [transcript.last for transcript in small.values()]
    assert sum(last.preemptions for last in finals if last is not None) == engine.stats().preemptions


def test_a_higher_class_takes_slot_and_blocks_of_a_lower_one() -> None:
    fake = runner(blocks=16)
    engine = make_engine(fake, max_num_seqs=2, watermark=0.0)
    engine.add(request("batch 1", prompt(20), max_tokens=20, priority=2))
    engine.add(request("batch 2", prompt(20, 1), max_tokens=20, priority=2))
    steps(engine, 2)
    engine.add(request("chat", prompt(24, 2), max_tokens=4, priority=0))
    outputs = engine.step()
    assert {output.request_id for output in outputs} == {"chat", "batch 1"}
    assert engine.stats().preemptions == 1
    assert [name for name, *_ in fake.plans[-1]] == ["batch 1", "chat"]
    run_out(engine)


def test_an_equal_class_preempts_nobody() -> None:
    engine = make_engine(runner(), max_num_seqs=1)
    engine.add(request("a", prompt(4), max_tokens=20))
    steps(engine, 2)
    engine.add(request("b", prompt(4, 1), max_tokens=1))
    steps(engine, 5)
    assert engine.stats().preemptions == 0


def test_capacity_counts_lower_classes_as_room() -> None:
    engine = make_engine(runner(blocks=64), max_num_seqs=4, output_reserve=8, watermark=0.0)
    assert engine.capacity().sequences == 4
    assert engine.capacity().tokens == 256
    engine.add(request("a", prompt(20), max_tokens=100, n=2, priority=2))
    assert engine.capacity(1).tokens == 256
    assert engine.capacity(1).sequences == 4
    low = engine.capacity(2)
    # 20 + 8 tokens are 7 blocks for each of two, and one block each stays as headroom.
    assert (low.sequences, low.tokens) == (2, 256 - 2 * 28 - 2 * 4)
    engine.abort("a")
    assert engine.capacity(2).tokens == 256


def test_capacity_is_never_negative() -> None:
    engine = make_engine(runner(blocks=8), max_num_seqs=1)
    for index in range(5):
        engine.add(request(str(index), prompt(20, index), max_tokens=4))
    assert engine.capacity() == engine.capacity(2)
    assert (engine.capacity().sequences, engine.capacity().tokens) == (0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": 8, "max_num_batched_tokens": 7},
        {"max_model_len": 1},
        {"watermark": 1.0},
        {"lookahead": -1},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SchedulerConfig(**settings)
