"""A request taken up by another engine at any point gives the ids, text and endings of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import EngineRequest, FinishReason, ResumedChoice
from engine.sequence import Sequence
from shared.errors import InvalidRequestError
from tests.support import tiny_tokenizer as tiny
from tests.support.engine_harness import Choice, Transcript, drain, make_engine, request, run_one
from tests.support.fake_runner import FakeRunner, NextToken, scripted

EMOJI = tiny.spell("\U0001f600")
#: What a random output is made of: characters in halves, parts of stop strings, an end.
PARTS = [EMOJI, EMOJI[:3], tiny.spell("\u00e9"), [tiny.piece("DEF")], [tiny.piece("G")], [tiny.piece("HI")],
         [tiny.piece(" cat")], [tiny.piece("x")], [tiny.TOOL], [tiny.EOS]]  # fmt: skip


def published(transcript: Transcript) -> list[ResumedChoice]:
    """What a log holds of a request."""
    reasons: dict[int, Any] = {index: choice.finish_reason for index, choice in transcript.choices.items()}
    return [
        ResumedChoice(index, list(choice.token_ids), choice.text, reasons[index])
        for index, choice in transcript.choices.items()
    ]


def cut_run(choose: NextToken, item: EngineRequest, cut: int, **fields: Any) -> tuple[Transcript, int]:
    """`cut` steps on one engine, the rest on another; and the tokens that the second one counted in all."""
    first = make_engine(FakeRunner(next_token=choose), **fields)
    before = Transcript()
    first.add(item)
    for _ in range(cut):
        for output in first.step():
            before.take(output)
    if before.last is not None:
        return before, before.last.usage.completion_tokens
    resumed = EngineRequest(item.id, item.prompt_token_ids, item.params, resume=published(before))
    second = make_engine(FakeRunner(next_token=choose), **fields)
    second.add(resumed)
    after = drain(second, {item.id: Transcript().resumed(resumed.resume)})[item.id]
    assert after.last is not None
    return after, after.last.usage.completion_tokens


def essence(choice: Choice) -> tuple[list[int], str, str | None]:
    return choice.token_ids, choice.text, choice.finish_reason


@settings(max_examples=80, deadline=None)
@given(
    outputs=st.lists(st.lists(st.sampled_from(PARTS), max_size=6), min_size=2, max_size=2),
    fields=st.fixed_dictionaries(
        {
            "n": st.integers(1, 2),
            "max_tokens": st.integers(1, 14),
            "min_tokens": st.integers(0, 1),
            "stop": st.sampled_from([None, ["DEFGHIJ", "GHI"], ["\U0001f600"], ["\u00e9", "catx"]]),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
        }
    ),
    caching=st.booleans(),
)
def test_any_cut_point_gives_the_same(outputs: list[list[list[int]]], fields: dict[str, Any], caching: bool) -> None:
    choose = scripted(*([token for part in output for token in part] for output in outputs))
    item = request(prompt=[1] * 9, **fields)
    whole = run_one(make_engine(FakeRunner(next_token=choose)), item)
    assert whole.last is not None
    for cut in range(16):
        resumed, completion = cut_run(choose, item, cut, enable_prefix_caching=caching)
        assert {i: essence(c) for i, c in resumed.choices.items()} == {i: essence(c) for i, c in whole.choices.items()}
        assert completion == whole.last.usage.completion_tokens


def test_resumed_tokens_are_output_and_the_prompt_is_unchanged() -> None:
    seen: list[tuple[int, int]] = []

    def choose(sequence: Sequence) -> int:
        seen.append((sequence.prompt_len, sequence.output_len))
        return 65

    engine = make_engine(FakeRunner(next_token=choose))
    item = request(prompt=[1] * 5, max_tokens=6, resume=[ResumedChoice(0, [65, 65], "bb")])
    engine.add(item)
    done = drain(engine, {"r": Transcript().resumed(item.resume)})["r"]
    assert seen == [(5, 2), (5, 3), (5, 4), (5, 5)]
    assert done.started
    assert done.last is not None
    assert (done.last.usage.prompt_tokens, done.last.usage.completion_tokens) == (5, 6)


def test_cached_tokens_are_of_the_prompt_also_where_output_is_cached() -> None:
    engine = make_engine(FakeRunner(next_token=scripted([65] * 99)))
    run_one(engine, request(prompt=[1] * 9, max_tokens=20))
    engine.add(request(prompt=[1] * 9, max_tokens=20, resume=[ResumedChoice(0, [65] * 15, "b" * 15)]))
    [output] = engine.step()
    assert engine.stats().prefix_hit_tokens == 20
    assert output.usage.cached_tokens == 9


@pytest.mark.parametrize(
    ("ids", "text", "fields", "rest", "reason", "stop"),
    [
        ([65, 65], "bb", {"max_tokens": 2}, "", "length", None),
        ([65, 65], "b", {"max_tokens": 2}, "b", "length", None),
        ([65, tiny.EOS], "b", {}, "", "stop", None),
        ([65, 66], "b", {"stop_token_ids": [66]}, "", "stop", 66),
        ([*EMOJI[:3]], "", {"max_tokens": 3}, "\ufffd", "length", None),
        ([tiny.piece("DEF"), tiny.piece("G")], "", {"stop": "EFG"}, "D", "stop", "EFG"),
        ([tiny.piece("DEF"), tiny.piece("G"), 65, 65], "D", {"stop": "EFG"}, "", "stop", "EFG"),
    ],
)
def test_what_had_ended_when_its_worker_died_ends_at_once(
    ids: list[int],
    text: str,
    fields: dict[str, Any],
    rest: str,
    reason: FinishReason,
    stop: str | int | None,
) -> None:
    engine = make_engine()
    engine.add(request(resume=[ResumedChoice(0, ids, text)], **fields))
    engine.check()
    assert engine.has_work()
    [output] = engine.step()
    [delta] = output.choices
    assert (delta.offset, delta.token_ids, delta.text) == (len(ids), [], rest)
    assert (delta.finish_reason, delta.stop_reason) == (reason, stop)
    assert output.finished
    assert output.usage.completion_tokens == len(ids)
    assert not engine.has_work()
    assert engine.stats().steps == 0


def test_finished_choices_say_nothing_and_are_counted() -> None:
    engine = make_engine(FakeRunner(next_token=scripted([65] * 9, [66] * 9)))
    finished = ResumedChoice(0, [65, 65, 65], "bbb", "stop")
    engine.add(request(n=2, max_tokens=4, resume=[finished, ResumedChoice(1, [66], "c")]))
    deltas = [delta for _ in range(3) for output in engine.step() for delta in output.choices]
    assert [(delta.index, delta.offset) for delta in deltas] == [(1, 1), (1, 2), (1, 3)]
    engine.add(request("all over", n=2, resume=[finished, ResumedChoice(1, [], "", "abort")]))
    [output] = engine.step()
    assert (output.finished, output.choices, output.usage.completion_tokens) == (True, [], 3)
    engine.check()


def test_abort_before_the_first_step_still_tells_what_had_ended() -> None:
    engine = make_engine()
    engine.add(request(n=2, max_tokens=2, resume=[ResumedChoice(0, [65, 65], "b"), ResumedChoice(1, [66], "")]))
    output = engine.abort("r")
    assert output is not None
    assert [(d.index, d.text, d.finish_reason) for d in output.choices] == [(0, "b", "length"), (1, "c", "abort")]
    assert not engine.has_work()
    assert engine.step() == []


def test_text_published_beyond_what_is_certain_is_not_sent_twice() -> None:
    engine = make_engine(FakeRunner(next_token=scripted([tiny.piece("DEF"), tiny.piece("x"), tiny.piece("c")])))
    item = request(max_tokens=3, stop="DEFG", resume=[ResumedChoice(0, [tiny.piece("DEF")], "DEF")])
    engine.add(item)
    done = drain(engine, {"r": Transcript().resumed(item.resume)})["r"]
    assert done.choices[0].text == "DEFxc"


@pytest.mark.parametrize(
    "resume",
    [
        [ResumedChoice(0, [65], "other")],
        [ResumedChoice(0, [-1], "")],
        [ResumedChoice(0, [tiny.VOCAB_SIZE], "")],
        [ResumedChoice(1, [65], "b")],
        [ResumedChoice(0, [65], "b"), ResumedChoice(0, [65], "b")],
    ],
)
def test_what_cannot_be_taken_up_is_refused_whole(resume: list[ResumedChoice]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(request(resume=resume))
    assert caught.value.param == "resume"
    engine.check()
    assert not engine.has_work()
