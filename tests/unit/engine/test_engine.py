"""What the engine tells of one request: text, stops, lengths, log probabilities, usage, refusals, failures, aborts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.detokenizer import Detokenizer
from engine.engine import Engine
from engine.plan import Sampled, StepPlan
from engine.request import EngineRequest
from engine.sequence import Sequence
from shared.errors import (
    ContextLengthExceededError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedParameterError,
)
from shared.sampling import SamplingParams
from tests.support import tiny_tokenizer as tiny
from tests.support.engine_harness import (
    TOKENIZER,
    Choice,
    Transcript,
    adapters,
    drain,
    make_engine,
    request,
    run,
    run_one,
)
from tests.support.fake_runner import FakeRunner, hashed_token, model_info, scripted


def say(*outputs: list[int], **settings: Any) -> Engine:
    """An engine whose choice `i` says `outputs[i]`, then EOS."""
    return make_engine(FakeRunner(next_token=scripted(*outputs)), **settings)


def words(*texts: str) -> list[int]:
    return [tiny.piece(text) for text in texts]


def only(transcript: Transcript) -> Choice:
    assert list(transcript.choices) == [0]
    return transcript.choices[0]


# --- text and stops ---


def test_interleaved_emoji_never_show_a_half() -> None:
    def choose(sequence: Sequence) -> int:
        text = "\U0001f600\u00e9" if sequence.request_id == "a" else "\u20ac\U0001f680"
        ids = [*tiny.spell(text), tiny.EOS]
        return ids[sequence.output_len]

    done = run(make_engine(FakeRunner(next_token=choose)), request("a", max_tokens=20), request("b", max_tokens=20))
    assert only(done["a"]).text == "\U0001f600\u00e9"
    assert only(done["b"]).text == "\u20ac\U0001f680"
    assert all("\ufffd" not in text for name in "ab" for text in only(done[name]).texts)


def test_an_incomplete_character_at_the_end_is_one_replacement() -> None:
    choice = only(run_one(say(tiny.spell(b"a\xf0\x9f\x98\x80")), request(max_tokens=4)))
    assert (choice.text, choice.finish_reason) == ("a\ufffd", "length")


def test_a_stop_string_over_tokens_is_cut_and_nothing_of_it_is_sent() -> None:
    engine = say(words("x", "DEF", "G", "HI", "J", "K"))
    choice = only(run_one(engine, request(max_tokens=20, stop=["DEFGHIJ"])))
    assert choice.texts == ["x", "", "", "", ""]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("x", "stop", "DEFGHIJ")
    assert choice.token_ids == words("x", "DEF", "G", "HI", "J")


def test_a_stop_inside_a_token_and_one_over_two() -> None:
    inside = only(run_one(say(words("a", " Paris", "b")), request(max_tokens=20, stop="Pari")))
    assert (inside.text, inside.stop_reason) == ("a ", "Pari")
    over = only(run_one(say(words("a", " beta", " gamma", "b")), request(max_tokens=20, stop="beta gamma")))
    assert (over.text, over.finish_reason) == ("a ", "stop")


def test_nothing_follows_a_stop_not_even_half_a_character() -> None:
    ids = [*tiny.spell(b"a\xc3"), tiny.piece(tiny.STRADDLE), *tiny.spell(b"\xac")]
    choice = only(run_one(say(ids), request(max_tokens=20, stop="\u00e9")))
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == ("a", "stop", 3)


def test_held_text_is_released_at_the_end() -> None:
    choice = only(run_one(say(words("x", "DEF", "G")), request(max_tokens=3, stop=["DEFGHIJ"])))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("xDEFG", "length", None)
    choice = only(run_one(say(words("x", "DEF")), request(max_tokens=9, stop=["DEFGHIJ"])))
    assert (choice.text, choice.finish_reason) == ("xDEF", "stop")


def test_include_stop_str_shows_the_stop_and_no_more() -> None:
    fields: dict[str, Any] = {"max_tokens": 20, "include_stop_str_in_output": True}
    choice = only(run_one(say(words("a", " Paris", "b")), request(stop="Pari", **fields)))
    assert choice.text == "a Pari"
    choice = only(run_one(say(words("a", "cat", "b")), request(stop_token_ids=words("cat"), **fields)))
    assert (choice.text, choice.stop_reason) == ("acat", tiny.piece("cat"))


def test_stop_strings_count_only_behind_min_tokens() -> None:
    engine = say(words("stop", "a", "stop", "b"))
    choice = only(run_one(engine, request(max_tokens=20, stop="stop", min_tokens=2)))
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == ("stopa", "stop", 3)


def test_min_tokens_come_before_any_end() -> None:
    engine = say([tiny.EOS] * 9)
    choice = only(run_one(engine, request(max_tokens=20, min_tokens=4, prompt=list(range(30)))))
    assert (len(choice.token_ids), choice.finish_reason) == (5, "stop")


@pytest.mark.parametrize("ids", [[tiny.EOS], [tiny.TOOL, tiny.EOS], [tiny.EOS, tiny.TOOL]])
def test_every_eos_id_ends_and_none_is_shown(ids: list[int]) -> None:
    for end in ids:
        fake = FakeRunner(next_token=scripted([*words("a"), end, *words("b")]))
        info = model_info(eos=ids)
        engine = Engine(fake, info, TOKENIZER, make_engine()._config)
        choice = only(run_one(engine, request(max_tokens=20)))
        assert (choice.text, choice.token_ids[-1], choice.finish_reason, choice.stop_reason) == ("a", end, "stop", None)


def test_ignore_eos_goes_on_and_a_stop_id_is_named() -> None:
    engine = say([*words("a"), tiny.EOS, *words("b", "cat", "c")])
    choice = only(run_one(engine, request(max_tokens=20, ignore_eos=True, stop_token_ids=words("cat"))))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", tiny.piece("cat"))


def test_eos_text_shows_only_where_asked_for() -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "skip_special_tokens": False}
    assert only(run_one(say(words("a")), request(**fields))).text == "a"
    shown = run_one(say(words("a")), request(include_stop_str_in_output=True, **fields))
    assert only(shown).text == "a<|end|>"


def test_length_and_stop_right_at_the_limit() -> None:
    assert only(run_one(say(words(*"abcdef")), request(max_tokens=1))).finish_reason == "length"
    eos = only(run_one(say(words("a", "b")), request(max_tokens=3)))
    assert (eos.finish_reason, len(eos.token_ids)) == ("stop", 3)
    text = only(run_one(say(words("a", "b", "c")), request(max_tokens=3, stop="c")))
    assert (text.text, text.finish_reason) == ("ab", "stop")


def test_without_detokenize_there_are_only_ids() -> None:
    choice = only(run_one(say(words("a", "b")), request(max_tokens=9, detokenize=False)))
    assert (choice.text, choice.token_ids) == ("", [*words("a", "b"), tiny.EOS])


def test_log_probabilities_travel_with_their_ids_and_spell_the_text() -> None:
    ids = [*tiny.spell("\u20ac"), *words("DEF", "G", "x")]
    choice = only(run_one(say(ids), request(max_tokens=6, stop="DEFGHIJ", logprobs=2)))
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert b"".join(entry.token for entry in choice.logprobs).decode() == choice.text == "\u20acDEFGx"
    assert choice.logprobs[3].top[0] == (tiny.piece("DEF"), choice.logprobs[3].logprob, 1, b"DEF")
    assert run_one(say(ids), request(max_tokens=2)).choices[0].logprobs == []


# --- usage ---


def test_usage_and_started_and_blocks() -> None:
    engine = make_engine(FakeRunner(next_token=scripted(words(*"abcd"), words(*"ab"))), max_num_seqs=2)
    transcript = run_one(engine, request(prompt=[5] * 9, n=2, max_tokens=4))
    assert transcript.started
    assert transcript.last is not None
    usage = transcript.last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (9, 4 + 3, 0)
    assert transcript.last.blocks == 2 + 1 + 1  # two shared, one of each choice's own
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (9, 7)


def test_a_preempted_request_says_so_as_soon_as_it_has_a_token_again() -> None:
    fake = FakeRunner(14, 4, next_token=scripted([9] * 99))
    engine = make_engine(fake, max_num_seqs=4, watermark=0.0)
    for number in range(2):
        engine.add(request(str(number), [1] * 9, max_tokens=30))
    said: dict[str, list[int]] = {"0": [], "1": []}
    while engine.has_work():
        for output in engine.step():
            if output.choices:
                said[output.request_id].append(output.preemptions)
    assert all(numbers == sorted(numbers) for numbers in said.values())
    again = next(numbers for numbers in said.values() if numbers[-1])
    assert again[0] == 0 and again.index(again[-1]) < len(again) - 1, "not only in the last one"


def test_usage_of_an_output_does_not_change_afterwards() -> None:
    engine = say(words(*"abcdef"))
    engine.add(request(max_tokens=5))
    first = engine.step()[0]
    engine.step()
    assert first.usage.completion_tokens == 1


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    fake = FakeRunner(14, 4, next_token=scripted([9] * 99))
    engine = make_engine(fake, max_num_seqs=4, watermark=0.0)
    run_one(engine, request("warm", [1] * 9, max_tokens=1))
    done = run(engine, *(request(str(i), [1] * 9, max_tokens=30) for i in range(2)))
    assert engine.stats().preemptions > 0
    assert [done[name].last.usage.cached_tokens for name in "01"] == [8, 8]  # type: ignore[union-attr]


def test_truncation_keeps_the_last_prompt_tokens() -> None:
    transcript = run_one(make_engine(), request("a", list(range(50)), truncate_prompt_tokens=10, max_tokens=5))
    whole = run_one(make_engine(), request("a", list(range(40, 50)), max_tokens=5))
    assert transcript.choices == whole.choices
    assert transcript.last is not None
    assert transcript.last.usage.prompt_tokens == 10


def test_an_unseeded_request_draws_and_a_seeded_one_does_not() -> None:
    seen: list[int] = []

    def choose(sequence: Sequence) -> int:
        seen.append(sequence.seed)
        return tiny.EOS

    engine = make_engine(FakeRunner(next_token=choose))
    run(engine, request("a", seed=42), request("b", seed=None), request("c", seed=None))
    assert seen[0] == 42
    assert len(set(seen)) == 3
    assert all(0 <= seed < 2**63 for seed in seen)


# --- refusals ---


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "settings", "message"),
    [
        (64, 1, {"max_model_len": 64}, "64 tokens.*context of 64 tokens"),
        (65, 1, {"max_model_len": 64}, "65 tokens.*context of 64 tokens"),
        (256, 1, {}, "256 tokens.*KV cache of 256 tokens"),
        (300, None, {}, "300 tokens.*KV cache of 256 tokens"),
        (200, 57, {}, "200 tokens and max_tokens is 57: 257 tokens.*KV cache of 256 tokens"),
    ],
)
def test_what_can_never_fit_is_refused_with_true_numbers(
    tokens: int, max_tokens: int | None, settings: dict[str, int], message: str
) -> None:
    engine = make_engine(FakeRunner(64, 4), **settings)
    with pytest.raises(ContextLengthExceededError, match=message):
        engine.add(request("big", [1] * tokens, max_tokens=max_tokens))
    assert not engine.has_work()
    assert only(run_one(engine, request("small", max_tokens=3))).token_ids


def test_what_just_fits_is_served_to_the_end() -> None:
    forever = scripted([9] * 999)
    exact = run_one(make_engine(FakeRunner(64, 4, next_token=forever)), request(prompt=[1] * 200, max_tokens=56))
    assert len(only(exact).token_ids) == 56
    context = make_engine(FakeRunner(64, 4, next_token=forever), max_model_len=64)
    capped = only(run_one(context, request(prompt=[1] * 63, max_tokens=99)))
    assert (len(capped.token_ids), capped.finish_reason) == (1, "length")
    pool = make_engine(FakeRunner(8, 4, next_token=forever))
    assert len(only(run_one(pool, request(prompt=[1] * 10, max_tokens=None))).token_ids) == 22


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (EngineRequest("x", [], SamplingParams()), "prompt"),
        (EngineRequest("x", [1, -1], SamplingParams()), "prompt"),
        (EngineRequest("x", [tiny.VOCAB_SIZE], SamplingParams()), "prompt"),
        (EngineRequest("x", [2**40], SamplingParams()), "prompt"),
        (EngineRequest("x", [1], SamplingParams(stop_token_ids=[tiny.VOCAB_SIZE])), "stop_token_ids"),
        (EngineRequest("x", [1], SamplingParams(logit_bias={tiny.VOCAB_SIZE: 1.0})), "logit_bias"),
    ],
)
def test_ids_out_of_the_vocabulary_and_empty_prompts_are_refused(bad: EngineRequest, param: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(bad)
    assert caught.value.param == param
    engine.check()
    assert not engine.has_work()


def test_a_live_id_is_refused() -> None:
    engine = make_engine()
    engine.add(request("a"))
    with pytest.raises(InvalidRequestError, match="already live"):
        engine.add(request("a"))
    drain(engine)
    engine.add(request("a"))
    drain(engine)


def test_an_adapter_that_is_not_registered_is_refused_not_ignored() -> None:
    engine = make_engine(library=adapters(["known"]))
    for name in ("unknown", ""):
        with pytest.raises(ModelNotFoundError) as caught:
            engine.add(request("a", adapter=name))
        assert caught.value.param == "adapter"
        assert not engine.has_work()
    engine.add(request("a", adapter="known"))
    drain(engine)


def test_an_engine_without_adapters_refuses_them() -> None:
    engine = Engine(FakeRunner(), model_info(), TOKENIZER, SchedulerConfig(max_model_len=64))
    with pytest.raises(UnsupportedParameterError):
        engine.add(request("a", adapter="known"))
    engine.add(request("a"))
    drain(engine)


# --- failures ---


class FailingRunner(FakeRunner):
    """Raises whenever a request named `bad` is in the pass, however many others are."""

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        if any(span.sequence.request_id == "bad" for span in plan.spans):
            raise RuntimeError("secret detail")
        return super().execute(plan)


def test_a_failing_pass_ends_only_the_guilty(caplog: pytest.LogCaptureFixture) -> None:
    alone = {name: run_one(make_engine(), request(name, [9, 8, 7], max_tokens=30)).choices for name in "ac"}
    engine = make_engine(FailingRunner(), max_num_batched_tokens=512)
    with caplog.at_level(logging.ERROR):
        done = run(engine, *(request(name, [9, 8, 7], max_tokens=30) for name in ("a", "bad", "c")))
    assert {name: done[name].choices for name in "ac"} == alone
    last = done["bad"].last
    assert last is not None
    assert isinstance(last.error, EngineError)
    assert "secret" not in last.error.message
    assert done["bad"].choices[0].finish_reason == "error"
    assert "secret detail" in caplog.text


def test_a_broken_device_fails_those_in_the_step_and_the_engine_goes_on() -> None:
    class Broken(FakeRunner):
        broken = True

        def execute(self, plan: StepPlan) -> list[Sampled | None]:
            if self.broken:
                raise MemoryError
            return super().execute(plan)

    fake = Broken()
    engine = make_engine(fake)
    done = run(engine, request("a"), request("b", n=2))
    assert all(isinstance(done[name].last.error, EngineError) for name in "ab")  # type: ignore[union-attr]
    fake.broken = False
    assert only(run_one(engine, request("c"))).finish_reason in ("stop", "length")


@pytest.mark.parametrize("token", [-1, tiny.VOCAB_SIZE + 5, 2**40])
def test_an_id_out_of_the_vocabulary_ends_that_request_only(token: int) -> None:
    def choose(sequence: Sequence) -> int:
        return token if sequence.request_id == "bad" and sequence.output_len == 2 else 65

    done = run(make_engine(FakeRunner(next_token=choose)), request("bad", max_tokens=9), request("a", max_tokens=9))
    assert only(done["bad"]).token_ids == [65, 65]
    assert only(done["bad"]).finish_reason == "error"
    assert only(done["a"]).token_ids == [65] * 9


def test_a_row_with_an_error_of_its_own_ends_that_request_only() -> None:
    class BadRow(FakeRunner):
        def execute(self, plan: StepPlan) -> list[Sampled | None]:
            answers = super().execute(plan)
            for index, span in enumerate(plan.spans):
                if span.sequence.request_id == "bad":
                    answers[index] = Sampled(-1, error=EngineError("logits are not finite"))
            return answers

    done = run(make_engine(BadRow()), request("bad", max_tokens=9), request("a", max_tokens=9))
    assert done["bad"].last is not None
    assert done["bad"].last.error is not None
    assert done["bad"].last.error.message == "logits are not finite"
    assert done["a"].last is not None
    assert done["a"].last.error is None


def test_blocks_of_a_failed_request_are_not_found_again() -> None:
    def choose(sequence: Sequence) -> int:
        return -1 if sequence.request_id == "bad" and sequence.output_len == 3 else 65

    engine = make_engine(FakeRunner(next_token=choose))
    run(engine, request("good", [1] * 20, max_tokens=9), request("bad", [2] * 20, max_tokens=9))
    again = run(engine, request("c", [1] * 20, max_tokens=1), request("d", [2] * 20, max_tokens=1))
    assert [again[name].last.usage.cached_tokens for name in "cd"] == [16, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("answers", [[], [None], [Sampled(1), Sampled(1)]])
def test_a_runner_that_answers_wrongly_ends_the_request_not_the_loop(answers: list[Sampled | None]) -> None:
    class Wrong(FakeRunner):
        def execute(self, plan: StepPlan) -> list[Sampled | None]:
            return answers

    assert only(run_one(make_engine(Wrong()), request())).finish_reason == "error"


def test_a_detokenizer_that_raises_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Detokenizer.stream

    def stream(self: Detokenizer, *, skip_special_tokens: bool = True, **others: bool) -> Any:
        inner = made(self, skip_special_tokens=skip_special_tokens, **others)
        if skip_special_tokens:
            return inner

        class Choking:
            def push(self, token_id: int) -> str:
                raise ValueError("choked")

            def flush(self) -> str:
                raise ValueError("choked")

        return Choking()

    monkeypatch.setattr(Detokenizer, "stream", stream)
    engine = make_engine(FakeRunner(next_token=scripted([65] * 99)))
    done = run(engine, request("bad", skip_special_tokens=False, max_tokens=5), request("a", max_tokens=5))
    assert only(done["bad"]).finish_reason == "error"
    assert len(only(done["a"]).token_ids) == 5
    engine.add(request("bad", skip_special_tokens=False, max_tokens=5))
    output = engine.abort("bad")
    assert output is not None
    assert output.finished
    engine.check()


def test_missing_log_probabilities_end_that_request_only() -> None:
    class Silent(FakeRunner):
        def execute(self, plan: StepPlan) -> list[Sampled | None]:
            return [Sampled(a.token_id) if a else None for a in super().execute(plan)]

    done = run(make_engine(Silent()), request("bad", logprobs=1), request("a"))
    assert only(done["bad"]).finish_reason == "error"
    assert only(done["a"]).finish_reason != "error"


def test_a_failing_choice_ends_its_siblings_with_one_delta_each() -> None:
    def choose(sequence: Sequence) -> int:
        return -1 if (sequence.index, sequence.output_len) == (1, 2) else 65

    transcript = run_one(make_engine(FakeRunner(next_token=choose)), request(n=3, max_tokens=9))
    assert transcript.last is not None
    assert transcript.last.error is not None
    assert [transcript.choices[index].finish_reason for index in range(3)] == ["error"] * 3


# --- aborts ---


def test_abort_of_unknown_and_finished_requests_does_nothing() -> None:
    engine = make_engine()
    assert engine.abort("never") is None
    run_one(engine, request("a"))
    assert engine.abort("a") is None
    engine.add(request("b"))
    assert engine.abort("b") is not None
    assert engine.abort("b") is None
    engine.check()


def test_abort_in_every_state_frees_everything_at_once() -> None:
    fake = FakeRunner(16, 4, next_token=scripted([65] * 999))
    engine = make_engine(fake, max_num_seqs=3, max_num_batched_tokens=8, watermark=0.0, enable_prefix_caching=False)
    engine.add(request("decoding", [1] * 4, max_tokens=40))
    engine.step()
    engine.add(request("chunk", [2] * 20, max_tokens=4))
    engine.step()
    engine.add(request("waiting", [3] * 40, max_tokens=4))
    for name, held in (("waiting", 0), ("chunk", 5)):
        used = engine.stats().used_blocks
        output = engine.abort(name)
        assert output is not None
        assert [delta.finish_reason for delta in output.choices] == ["abort"]
        assert used - engine.stats().used_blocks == held
        engine.check()
    engine.add(request("young", [4] * 30, max_tokens=20))
    while not engine.stats().preemptions:
        engine.step()
    output = engine.abort("young")
    assert output is not None
    assert output.preemptions == 1
    engine.check()
    assert engine.abort("decoding") is not None
    assert engine.stats().used_blocks == 0
    assert not engine.has_work()
    assert engine.step() == []


def test_abort_releases_held_text_and_keeps_true_usage() -> None:
    engine = say(words("x", "DEF", "G", "HI"))
    engine.add(request("a", max_tokens=20, stop="DEFGHIJ"))
    texts = [engine.step()[0].choices[0].text for _ in range(3)]
    output = engine.abort("a")
    assert output is not None
    assert [*texts, output.choices[0].text] == ["x", "", "", "DEFG"]
    assert (output.choices[0].offset, output.choices[0].token_ids) == (3, [])
    assert (output.finished, output.usage.completion_tokens, output.usage.prompt_tokens) == (True, 3, 3)


def test_an_aborted_id_may_be_used_again() -> None:
    engine = make_engine()
    first = run_one(make_engine(), request("a", max_tokens=9))
    engine.add(request("a", max_tokens=9))
    engine.step()
    engine.abort("a")
    assert drain(engine) == {}
    assert run_one(engine, request("a", max_tokens=9)).choices == first.choices


def test_blocks_of_a_finished_request_are_free_in_the_same_step() -> None:
    engine = make_engine(FakeRunner(next_token=hashed_token), enable_prefix_caching=False)
    engine.add(request(max_tokens=1))
    assert engine.step()[0].finished
    assert engine.stats().free_blocks == 64


def test_mass_abort_gives_everything_back() -> None:
    engine = make_engine(FakeRunner(20, 4), max_num_seqs=2)
    for index in range(50):
        engine.add(request(str(index), [index] * 9, n=1 + index % 2))
        if index % 5 == 0:
            engine.step()
    for index in range(50):
        engine.abort(str(index))
        engine.check()
    assert not engine.has_work()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert only(run_one(engine, request("after"))).token_ids
