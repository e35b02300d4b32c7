"""Log probabilities of the prompt: complete, once, from the model's own passes, whatever happens on the way."""

from __future__ import annotations

from typing import Any

import pytest

from engine.engine import Engine
from engine.plan import Sampled, StepPlan
from engine.request import LogprobEntry, ResumedChoice, StepOutput
from shared.errors import InvalidRequestError
from tests.support.engine_harness import drain, make_engine, request, run, run_one
from tests.support.fake_runner import FakeRunner

PROMPT = [(11 * i) % 90 for i in range(21)]


def entries(engine: Engine) -> tuple[list[LogprobEntry], list[StepOutput]]:
    """All entries, and the outputs that brought them."""
    found: list[LogprobEntry] = []
    outputs: list[StepOutput] = []
    while engine.has_work():
        for output in engine.step():
            assert not (output.prompt_logprobs and any(o.choices for o in outputs)), "an entry behind a token"
            found += output.prompt_logprobs
            outputs.append(output)
        engine.check()
    return found, outputs


def scores(**settings: Any) -> list[LogprobEntry]:
    engine = make_engine(FakeRunner(64, 4), **settings)
    engine.add(request(prompt=PROMPT, prompt_logprobs=2, max_tokens=3, ignore_eos=True))
    return entries(engine)[0]


@pytest.mark.parametrize("budget", [2, 3, 4, 7, 20, 21, 512])
def test_there_is_one_for_each_token_but_the_first(budget: int) -> None:
    found = scores(max_num_seqs=2, max_num_batched_tokens=budget)
    assert [entry.token_id for entry in found] == PROMPT[1:]
    assert all(len(entry.top) == 2 and entry.token for entry in found)
    assert found == scores()


def test_a_prompt_of_one_token_has_none() -> None:
    engine = make_engine(FakeRunner(64, 4))
    engine.add(request(prompt=[5], prompt_logprobs=2, max_tokens=2, ignore_eos=True))
    found, outputs = entries(engine)
    assert found == []
    assert outputs[-1].finished


def test_the_prefix_cache_is_not_read_but_filled() -> None:
    fake = FakeRunner(64, 4)
    engine = make_engine(fake)
    run_one(engine, request("warm", PROMPT, max_tokens=1, ignore_eos=True))
    before = fake.computed_tokens
    engine.add(request(prompt=PROMPT, prompt_logprobs=2, max_tokens=3, ignore_eos=True))
    found, outputs = entries(engine)
    assert found == scores()
    assert outputs[-1].usage.cached_tokens == 0
    assert fake.computed_tokens - before == len(PROMPT) + 2
    done = run_one(engine, request("after", PROMPT, max_tokens=1, ignore_eos=True))
    assert done.last is not None
    assert done.last.usage.cached_tokens == 20


def test_two_equal_prompts_do_not_wait_for_each_other() -> None:
    fake = FakeRunner(64, 4)
    engine = make_engine(fake)
    done = run(engine, *(request(name, PROMPT, prompt_logprobs=0, max_tokens=1, ignore_eos=True) for name in "ab"))
    assert fake.computed_tokens == 2 * len(PROMPT)
    assert all(len(each.prompt_logprobs) == 20 for each in done.values())


@pytest.mark.parametrize("caching", [False, True])
def test_choices_wait_for_the_one_that_takes_them(caching: bool) -> None:
    fake = FakeRunner(64, 4)
    engine = make_engine(fake, enable_prefix_caching=caching, max_num_seqs=4, max_num_batched_tokens=6)
    if caching:  # full blocks of the prompt that the other choices could take at once
        run_one(engine, request("warm", PROMPT, max_tokens=1, ignore_eos=True))
    engine.add(request(prompt=PROMPT, prompt_logprobs=2, n=3, max_tokens=3, ignore_eos=True))
    found, outputs = entries(engine)
    assert found == scores()
    assert {delta.index for output in outputs for delta in output.choices} == {0, 1, 2}


def test_preemption_takes_none_twice() -> None:
    """An intruder of a higher class takes the pool while the prompt is half computed."""
    fake = FakeRunner(8, 4)
    engine = make_engine(fake, max_num_seqs=2, max_num_batched_tokens=6, max_model_len=32)
    engine.add(request(prompt=PROMPT, prompt_logprobs=2, max_tokens=3, ignore_eos=True))
    outputs = engine.step() + engine.step()
    engine.add(request("high", [3] * 20, max_tokens=4, priority=0, ignore_eos=True))
    found = [entry for output in outputs for entry in output.prompt_logprobs]
    while engine.has_work():
        for output in engine.step():
            found += output.prompt_logprobs
        engine.check()
    assert engine.stats().preemptions == 1
    assert found == scores()


@pytest.mark.parametrize("done", [0, 1, 9, 20])
def test_taken_up_from_what_is_published(done: int) -> None:
    engine = make_engine(FakeRunner(64, 4), max_num_seqs=2, max_num_batched_tokens=6)
    fields: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 3, "ignore_eos": True}
    engine.add(request(prompt=PROMPT, prompt_logprobs_done=done, **fields))
    assert entries(engine)[0] == scores()[done:]


def test_taken_up_behind_the_prompt_reads_the_cache_again() -> None:
    fields: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 3, "ignore_eos": True}
    fake = FakeRunner(64, 4)
    engine = make_engine(fake)
    whole = run_one(engine, request("first", PROMPT, **fields)).choices[0]
    before = fake.computed_tokens
    published = [ResumedChoice(0, whole.token_ids[:1], whole.texts[0])]
    engine.add(request(prompt=PROMPT, prompt_logprobs_done=20, resume=published, **fields))
    found, outputs = entries(engine)
    assert found == []
    assert [token for output in outputs for delta in output.choices for token in delta.token_ids] == whole.token_ids[1:]
    assert fake.computed_tokens - before < len(PROMPT)


@pytest.mark.parametrize(
    ("done", "published"), [(-1, []), (21, []), (19, [ResumedChoice(0, [3], "")]), (0, [ResumedChoice(0, [3], "")])]
)
def test_what_cannot_have_been_published_is_refused(done: int, published: list[ResumedChoice]) -> None:
    engine = make_engine(FakeRunner(64, 4))
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(request(prompt=PROMPT, prompt_logprobs=2, prompt_logprobs_done=done, resume=published))
    assert caught.value.param == "prompt_logprobs_done"
    assert not engine.has_work()


def test_truncation_comes_first() -> None:
    engine = make_engine(FakeRunner(64, 4))
    engine.add(request(prompt=[*range(50, 70), *PROMPT], truncate_prompt_tokens=21, prompt_logprobs=2, max_tokens=3))
    assert entries(engine)[0] == scores()


def test_a_runner_that_gives_too_few_fails_that_request_only() -> None:
    class Short(FakeRunner):
        def execute(self, plan: StepPlan) -> list[Sampled | None]:
            answers = super().execute(plan)
            for span, answer in zip(plan.spans, answers, strict=True):
                if span.scored and answer is not None and span.sequence.request_id == "bad":
                    answer.prompt_logprobs.pop()
            return answers

    engine = make_engine(Short(64, 4))
    done = run(engine, request("bad", PROMPT, prompt_logprobs=1), request("good", PROMPT[::-1], prompt_logprobs=1))
    assert done["bad"].last is not None
    assert done["bad"].last.error is not None
    assert done["good"].last is not None
    assert done["good"].last.error is None
    assert len(done["good"].prompt_logprobs) == 20


def test_an_abort_in_the_middle_frees_all() -> None:
    engine = make_engine(FakeRunner(64, 4), max_num_seqs=2, max_num_batched_tokens=6)
    engine.add(request(prompt=PROMPT, prompt_logprobs=2, n=2))
    engine.step()
    assert engine.abort("r") is not None
    engine.check()
    assert engine.stats().used_blocks == 0
    assert drain(engine) == {}
