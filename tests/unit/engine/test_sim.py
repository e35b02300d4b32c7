"""The simulated engine: pure tokens, endings, resumption, blocks, classes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from engine.request import EngineRequest, LogprobEntry, ResumedChoice, StepOutput
from engine.sim import SimConfig, SimEngine
from engine.sim_model import END, SimVocabulary
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.protocol import ChoiceResult
from shared.sampling import SamplingParams

VOCABULARY = SimVocabulary()


def engine(**config: object) -> SimEngine:
    return SimEngine(SimConfig(step_ms=0, **config))  # type: ignore[arg-type]


def request(
    name: str = "a",
    *,
    prompt: int = 4,
    priority: int = 1,
    resume: list[ResumedChoice] | None = None,
    done: int = 0,
    **params: object,
) -> EngineRequest:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 50, "ignore_eos": True, **params})  # type: ignore[arg-type]
    ids = list(range(20, 20 + prompt))
    return EngineRequest(name, ids, sampling, priority, resume=resume or [], prompt_logprobs_done=done)


def run(sim: SimEngine, *requests: EngineRequest) -> dict[str, list[ChoiceResult]]:
    """All choices, after every invariant has been verified in every step."""
    results: dict[str, list[ChoiceResult]] = {}
    for item in requests:
        sim.add(item)
        results[item.id] = [ChoiceResult(index=index) for index in range(item.params.n)]
    while sim.has_work():
        collect(sim.step(), results)
        sim.check()
    stats = sim.stats()
    assert (stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0)
    return results


def collect(outputs: list[StepOutput], results: dict[str, list[ChoiceResult]]) -> None:
    for output in outputs:
        for delta in output.choices:
            choice = results[output.request_id][delta.index]
            assert choice.finish_reason is None and delta.offset >= len(choice.token_ids)
            choice.token_ids += delta.token_ids
            choice.text += delta.text
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason


def test_needs_no_torch() -> None:
    code = "import sys, engine.sim; engine.sim.SimEngine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tokenizer_is_byte_exact_and_travels_as_json() -> None:
    loaded = Tokenizer.from_str(VOCABULARY.tokenizer_json)
    assert loaded.get_vocab_size() == VOCABULARY.size and loaded.token_to_id(END) == VOCABULARY.end_id
    for text in ("the cable  café\t😀\n", "".join(map(chr, range(700))), f"a{END}b"):
        ids = loaded.encode(text).ids
        assert loaded.decode(ids, skip_special_tokens=False) == text
        assert b"".join(VOCABULARY.token_bytes(token) for token in ids).decode() == text


def test_tokens_depend_on_the_request_alone() -> None:
    alone = run(engine(), request(n=2))["a"]
    crowd = [request(f"x{i}", prompt=3 + i, seed=i) for i in range(6)]
    together = run(engine(max_num_batched_tokens=7, num_blocks=12, block_size=8), *crowd, request(n=2))["a"]
    assert together == alone and alone[0].token_ids != alone[1].token_ids
    assert run(engine(), request(n=2, seed=2))["a"] != alone
    assert run(engine(), request(n=2, prompt=5))["a"] != alone


@pytest.mark.parametrize(("keep", "most", "kept"), [(10, 50, 10), (-1, 50, 14), (-1, None, 63), (-1, 80, 1)])
def test_truncation_keeps_the_last_prompt_tokens(keep: int, most: int | None, kept: int) -> None:
    cut = request("cut", prompt=100, truncate_prompt_tokens=keep, max_tokens=most)
    short = request("short", prompt=kept, max_tokens=most)
    short.prompt_token_ids = cut.prompt_token_ids[-kept:]
    results = run(engine(max_model_len=64), cut, short)
    assert results["cut"] == results["short"]
    assert cut.prompt_token_ids == list(range(20, 120)), "the caller's own list stays as it is"


def scores(sim: SimEngine, *requests: EngineRequest) -> dict[str, list[list[LogprobEntry]]]:
    """Log probabilities of prompts as the steps bring them; all come before the first token."""
    found: dict[str, list[list[LogprobEntry]]] = {}
    answered: set[str] = set()
    for item in requests:
        sim.add(item)
    while sim.has_work():
        for output in sim.step():
            if output.prompt_logprobs:
                assert output.request_id not in answered
                found.setdefault(output.request_id, []).append(output.prompt_logprobs)
            answered |= {output.request_id for delta in output.choices if delta.token_ids}
        sim.check()
    return found


def test_log_probabilities_of_a_prompt_come_chunk_by_chunk_and_depend_on_it_alone() -> None:
    ask = {"prompt": 40, "prompt_logprobs": 3, "max_tokens": 5}
    alone = scores(engine(), request(**ask))["a"]  # type: ignore[arg-type]
    assert [len(chunk) for chunk in alone] == [39]
    whole = alone[0]
    assert [entry.token_id for entry in whole] == list(range(21, 60))
    assert len({entry.logprob for entry in whole}) > 20 and all(entry.logprob < 0 for entry in whole)
    for entry in whole:
        assert [rank for _, _, rank, _ in entry.top] == [1, 2, 3] and len({token for token, *_ in entry.top}) == 3
        assert (entry.token_id in [token for token, *_ in entry.top]) == (entry.rank <= 3)
    crowd = [request(f"x{i}", prompt=5 + i, seed=i) for i in range(6)]
    tight = engine(max_num_batched_tokens=9, num_blocks=16, block_size=8)
    together = scores(tight, *crowd, request(n=2, seed=7, **ask))["a"]  # type: ignore[arg-type]
    assert len(together) > 3 and [entry for chunk in together for entry in chunk] == whole
    assert tight.stats().preemptions > 0


@pytest.mark.parametrize("done", [0, 1, 20, 38, 39])
def test_log_probabilities_of_a_prompt_go_on_behind_those_published(done: int) -> None:
    ask = {"prompt": 40, "prompt_logprobs": 0, "max_tokens": 5}
    whole = scores(engine(), request(**ask))["a"]  # type: ignore[arg-type]
    resume = [ResumedChoice(0, [300], " cable")] if done == 39 else None
    rest = scores(engine(max_num_batched_tokens=7), request(done=done, resume=resume, **ask))  # type: ignore[arg-type]
    assert [entry for chunk in rest.get("a", []) for entry in chunk] == whole[0][done:]


def test_a_prompt_of_one_token_has_no_log_probabilities() -> None:
    assert scores(engine(), request(prompt=1, prompt_logprobs=5)) == {}
    assert scores(engine(), request()) == {}


def test_greedy_does_not_depend_on_the_seed() -> None:
    assert run(engine(), request(temperature=0, seed=1)) == run(engine(), request(temperature=0, seed=2))


def test_text_is_that_of_the_tokens() -> None:
    choice = run(engine(), request())["a"][0]
    assert choice.text == b"".join(VOCABULARY.token_bytes(token) for token in choice.token_ids).decode()


def test_half_a_character_is_held_back_and_flushed_once_at_the_end() -> None:
    first, second, third, _ = "😀".encode()
    sim = engine()
    sim.add(request(max_tokens=3, allowed_token_ids=[first, second, third]))
    texts = [delta.text for _ in range(3) for output in sim.step() for delta in output.choices]
    assert len(texts) == 3 and "".join(texts).count("�") >= 1 and not sim.has_work()


def test_endings() -> None:
    free = run(engine(eos_period=20), request(ignore_eos=False, max_tokens=1000))["a"][0]
    assert free.finish_reason == "stop" and free.stop_reason is None and free.token_ids[-1] == VOCABULARY.end_id
    assert END not in free.text
    count = len(free.token_ids)
    exactly = run(engine(eos_period=20), request(ignore_eos=False, max_tokens=count))["a"][0]
    assert exactly == free, "an end on the last allowed token is a stop"
    short = run(engine(eos_period=20), request(ignore_eos=False, max_tokens=count - 1))["a"][0]
    assert short.finish_reason == "length" and short.token_ids == free.token_ids[:-1]
    longer = run(engine(eos_period=20), request(ignore_eos=False, max_tokens=1000, min_tokens=count))["a"][0]
    assert len(longer.token_ids) > count and VOCABULARY.end_id not in longer.token_ids[:count]


def test_stop_id_ends_and_is_masked_below_min_tokens() -> None:
    whole = run(engine(), request())["a"][0]
    stop = whole.token_ids[10]
    ended = run(engine(), request(stop_token_ids=[stop]))["a"][0]
    assert ended.stop_reason == stop and ended.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    late = run(engine(), request(stop_token_ids=[stop], min_tokens=30))["a"][0]
    assert stop not in late.token_ids[:30]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_two_tokens_is_cut_and_never_shown(include: bool) -> None:
    whole = run(engine(), request())["a"][0]
    words = whole.text.split(" ")
    stop = f"{words[9][-2:]} {words[10][:2]}"
    sim = engine()
    sim.add(request(stop=["zzzz", stop], include_stop_str_in_output=include))
    shown, last = "", None
    while sim.has_work():
        for output in sim.step():
            for last in output.choices:
                shown += last.text
    at = whole.text.index(stop)
    assert shown == whole.text[: at + len(stop) if include else at]
    assert last is not None and last.finish_reason == "stop" and last.stop_reason == stop


@pytest.mark.parametrize("stop", [None, "e t", " the"])
def test_resumption_at_any_token_gives_the_same(stop: str | None) -> None:
    def fresh(resume: list[ResumedChoice] | None = None) -> EngineRequest:
        return request(n=2, max_tokens=25, stop=stop and [stop], resume=resume)

    whole = run(engine(), fresh())["a"]
    sim = engine()
    sim.add(fresh())
    published = {"a": [ChoiceResult(index=0), ChoiceResult(index=1)]}
    while sim.has_work():
        collect(sim.step(), published)
        resume = [
            ResumedChoice(c.index, list(c.token_ids), c.text, c.finish_reason) for c in published["a"] if c.token_ids
        ]
        if all(c.finish_reason for c in published["a"]):
            continue
        second = engine()
        second.add(fresh(resume))
        merged = {
            "a": [
                ChoiceResult(
                    index=c.index,
                    text=c.text,
                    token_ids=list(c.token_ids),
                    finish_reason=c.finish_reason,
                    stop_reason=c.stop_reason,
                )
                for c in published["a"]
            ]
        }
        usage = None
        while second.has_work():
            for output in second.step():
                collect([output], merged)
                usage = output.usage
        assert merged["a"] == whole
        assert usage is not None and usage.completion_tokens == sum(len(c.token_ids) for c in whole)


def test_preemption_changes_no_token_and_gives_every_block_back() -> None:
    requests = [request(f"r{i}", prompt=10, max_tokens=60, seed=i) for i in range(6)]
    roomy = run(engine(), *requests)
    tight = engine(num_blocks=12, block_size=8)
    assert run(tight, *requests) == roomy
    assert tight.stats().preemptions > 0


def test_a_higher_class_preempts_and_capacity_counts_it() -> None:
    sim = engine(max_num_seqs=2, num_blocks=16, block_size=16)
    for name in ("b1", "b2"):
        sim.add(request(name, priority=2, max_tokens=60))
    sim.step()
    assert sim.capacity(2).sequences == 0 and sim.capacity(0).sequences == 2
    assert sim.capacity(0).tokens == 256 and sim.capacity(2).tokens == 256 - 2 * 64
    sim.add(request("h", priority=0, max_tokens=60))
    assert {output.request_id for output in sim.step()} == {"b1", "h"}
    sim.check()
    assert sim.stats().preemptions == 1


def test_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    sim = engine(max_num_batched_tokens=16, max_model_len=512)
    sim.add(request("short", max_tokens=100))
    sim.step()
    sim.add(request("long", prompt=100))
    for _ in range(5):
        assert "short" in {output.request_id for output in sim.step() if output.choices}


def test_abort_in_every_state_is_final_and_idempotent() -> None:
    sim = engine(max_num_seqs=1, max_num_batched_tokens=8)
    for name, prompt in (("running", 4), ("waiting", 4)):
        sim.add(request(name, prompt=prompt, n=1))
    sim.step()
    for name in ("waiting", "running"):
        output = sim.abort(name)
        assert output is not None and output.finished
        assert [delta.finish_reason for delta in output.choices] == ["abort"]
        assert sim.abort(name) is None
        sim.check()
    sim.add(request("chunked", prompt=30))
    sim.step()
    assert sim.abort("chunked") is not None
    assert not sim.has_work() and sim.stats().used_blocks == 0


def test_abort_releases_held_text() -> None:
    sim = engine()
    whole = run(engine(), request())["a"][0].text
    sim.add(request(stop=[whole[:40]]))
    shown = "".join(delta.text for _ in range(3) for output in sim.step() for delta in output.choices)
    assert shown == ""
    output = sim.abort("a")
    assert output is not None and whole.startswith(output.choices[0].text) and output.choices[0].text


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"prompt": 0}, InvalidRequestError),
        ({"prompt": 64}, ContextLengthExceededError),
        ({"stop_token_ids": [10**6]}, InvalidRequestError),
        ({"prompt_logprobs": 1, "done": 4}, InvalidRequestError),
        ({"prompt_logprobs": 1, "done": 2, "resume": [ResumedChoice(0, [300], "")]}, InvalidRequestError),
        ({"resume": [ResumedChoice(3, [], "")]}, InvalidRequestError),
    ],
)
def test_refusals(bad: dict[str, object], error: type[Exception]) -> None:
    sim = engine(max_model_len=64)
    with pytest.raises(error):
        sim.add(request("b", **bad))  # type: ignore[arg-type]
    sim.add(request("a"))
    with pytest.raises(InvalidRequestError):
        sim.add(request("a"))
    sim.check()


def test_logprobs_have_the_right_shape() -> None:
    sim = engine()
    sim.add(request(logprobs=3, max_tokens=4))
    entries = [
        entry for _ in range(4) for output in sim.step() for delta in output.choices for entry in delta.logprobs or []
    ]
    assert len(entries) == 4
    for entry in entries:
        assert [rank for _, _, rank, _ in entry.top] == [1, 2, 3]
        assert entry.top[0][0] == entry.token_id and entry.logprob < 0
        assert len({token for token, *_ in entry.top}) == 3
        assert [value for _, value, _, _ in entry.top] == sorted((v for _, v, _, _ in entry.top), reverse=True)


def test_random_life_keeps_every_invariant() -> None:
    rng = random.Random(5)
    sim = engine(num_blocks=20, block_size=4, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64)
    live: set[str] = set()
    for number in range(400):
        if rng.random() < 0.4:
            name = f"r{number}"
            sim.add(
                request(
                    name,
                    prompt=rng.randrange(1, 20),
                    priority=rng.randrange(3),
                    seed=number,
                    n=rng.randrange(1, 4),
                    max_tokens=rng.randrange(1, 40),
                )
            )
            live.add(name)
        if live and rng.random() < 0.1:
            name = rng.choice(sorted(live))
            assert sim.abort(name) is not None
            live.discard(name)
        for output in sim.step():
            if output.finished:
                live.discard(output.request_id)
        sim.check()
    while sim.has_work():
        live -= {output.request_id for output in sim.step() if output.finished}
        sim.check()
    assert not live and sim.stats().used_blocks == 0
