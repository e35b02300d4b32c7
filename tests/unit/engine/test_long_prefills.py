"""A long prompt beside running streams: it comes in small chunks, and in large ones where nobody waits for a token."""

from __future__ import annotations

import pytest

from engine.config import SchedulerConfig
from engine.engine import Engine
from tests.support.engine_harness import make_engine, request, run
from tests.support.fake_runner import FakeRunner

LONG = [(13 * i) % 90 for i in range(150)]


def engine_with(threshold: int) -> tuple[Engine, FakeRunner]:
    fake = FakeRunner(128, 4)
    return make_engine(fake, max_num_batched_tokens=64, max_num_seqs=4, long_prefill_token_threshold=threshold), fake


def chunks(fake: FakeRunner, name: str) -> list[int]:
    return [count for plan in fake.plans for who, _, _, count in plan if who == name]


def test_chunks_are_short_only_while_others_decode() -> None:
    engine, fake = engine_with(16)
    engine.add(request("stream", [1, 2, 3], max_tokens=5, ignore_eos=True))
    engine.step()
    engine.add(request("long", LONG, max_tokens=1, ignore_eos=True))
    while engine.has_work():
        engine.step()
    assert chunks(fake, "stream") == [3, 1, 1, 1, 1]
    # Beside the four decodes, and then alone.
    assert chunks(fake, "long") == [16, 16, 16, 16, 64, 22]


def test_the_bound_is_that_of_each_prompt_and_the_budget_that_of_all() -> None:
    engine, fake = engine_with(30)
    engine.add(request("stream", [1, 2, 3], max_tokens=9, ignore_eos=True))
    engine.step()
    for name in ("a", "b", "c"):
        engine.add(request(name, [ord(name), *LONG], max_tokens=1, ignore_eos=True))
    engine.step()
    assert {who: count for who, _, _, count in fake.plans[-1]} == {"stream": 1, "a": 30, "b": 30, "c": 3}


def test_without_it_a_prompt_takes_the_whole_budget() -> None:
    engine, fake = engine_with(0)
    engine.add(request("stream", [1, 2, 3], max_tokens=5, ignore_eos=True))
    engine.step()
    engine.add(request("long", LONG, max_tokens=1, ignore_eos=True))
    engine.step()
    assert chunks(fake, "long") == [63]


@pytest.mark.parametrize("threshold", [0, 1, 3, 64, 1000])
def test_answers_do_not_depend_on_it(threshold: int) -> None:
    def answers(engine: Engine) -> dict[str, object]:
        done = run(engine, *(request(str(i), LONG[i : 40 + 9 * i], n=1 + i % 2, seed=i) for i in range(6)))
        return {name: each.choices for name, each in done.items()}

    assert answers(engine_with(threshold)[0]) == answers(engine_with(0)[0])


def test_a_negative_one_is_refused() -> None:
    with pytest.raises(ValueError, match="long_prefill_token_threshold"):
        SchedulerConfig(long_prefill_token_threshold=-1)


@pytest.mark.parametrize(("max_tokens", "kept"), [(None, 63), (1, 63), (10, 54), (63, 1), (1000, 1)])
def test_truncation_to_what_fits(max_tokens: int | None, kept: int) -> None:
    fake = FakeRunner(128, 4)
    engine = make_engine(fake, max_model_len=64)
    engine.add(request("r", LONG, truncate_prompt_tokens=-1, max_tokens=max_tokens, ignore_eos=True))
    output = engine.step()[0]
    assert output.usage.prompt_tokens == kept
    engine.abort("r")
