"""The runner over a model of known outputs: rows, answers, copies, and what a failed sequence leaves behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.cpu_share import CpuShare
from engine.loading.resolve import load
from engine.models.config import ModelConfig
from engine.models.registry import model_class
from engine.plan import Sampled, Span, StepPlan
from engine.request import LogprobEntry
from engine.runner import SCORED_ROWS, ModelRunner
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.blocked import BlockedLogits
from kernels.ops import Ops, ops_for
from shared.sampling import SamplingParams
from tests.support.native import load_native
from tests.support.tiny_llama import VOCAB, save_tiny_model

BLOCK = 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("tiny") / "model"
    return path, save_tiny_model(path)


@pytest.fixture(params=["torch", "native", "screened"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """The operations for a CPU, of torch and native; `screened`: greedy tokens are looked for without all logits."""
    native = request.param != "torch"
    if native:
        load_native()
    return ops_for("cpu", native=native)


@pytest.fixture
def runner(
    reference: tuple[Path, PreTrainedModel], tmp_path: Path, ops: Ops, request: pytest.FixtureRequest
) -> ModelRunner:
    loaded = load_runner(reference[0], tmp_path, ops)
    if "screened" in str(request.node.name):
        loaded._model.screen_head()
    return loaded


def load_runner(folder: Path, cache: Path, ops: Ops) -> ModelRunner:
    checkpoint = load(str(folder), cache)
    config = ModelConfig.from_hf(checkpoint.config)
    model = model_class("LlamaForCausalLM")(config, checkpoint.tensors, ops, torch.device("cpu"), torch.float32, 256)
    return ModelRunner(model, Sampler(ops, lambda text: []), ops, num_blocks=80, block_size=BLOCK)


def sequence(name: str, tokens: list[int], table: list[int], **options: Any) -> Sequence:
    params = SamplingParams(temperature=0, **options)
    return Sequence(name, 0, params, 0, tokens, len(tokens), 300, block_table=table)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 7) % VOCAB for i in range(length)]


def whole(s: Sequence) -> Span:
    return Span(s, 0, len(s.tokens), sample=True)


def answer(runner: ModelRunner, *spans: Span) -> list[int | None]:
    found = runner.execute(StepPlan(list(spans), decodes=sum(span.count == 1 for span in spans)))
    assert all(each is None or each.error is None for each in found)
    return [None if each is None else each.token_id for each in found]


def test_an_empty_plan_runs_nothing(runner: ModelRunner) -> None:
    assert runner.execute(StepPlan()) == []


def test_answers_follow_the_spans_and_only_samples_have_one(runner: ModelRunner) -> None:
    a, b, c = (
        sequence(n, prompt(i, length), [3 * i, 3 * i + 1, 3 * i + 2])
        for i, (n, length) in enumerate((("a", 9), ("b", 2), ("c", 6)))
    )
    alone = [answer(runner, whole(s))[0] for s in (a, b, c)]
    part = Span(b, 0, 1, sample=False)
    assert answer(runner, part, whole(c), whole(a)) == [None, alone[2], alone[0]]
    assert answer(runner, Span(b, 1, 1, sample=True)) == [alone[1]]
    assert len({alone[0], alone[1], alone[2]}) > 1


def test_the_same_positions_may_be_written_again(runner: ModelRunner) -> None:
    s = sequence("a", prompt(5, 7), [4, 9])
    first = answer(runner, whole(s))
    assert answer(runner, whole(s)) == first
    assert answer(runner, Span(s, 6, 1, sample=True)) == first


def test_copied_blocks_carry_keys_and_values(runner: ModelRunner) -> None:
    source = sequence("a", prompt(2, 7), [0, 1])
    expected = answer(runner, whole(source))
    twin = sequence("b", source.tokens, [10, 11])
    plan = StepPlan([Span(twin, 6, 1, sample=True)], decodes=1, copies=[(0, 10), (1, 11)])
    (found,) = runner.execute(plan)
    assert found is not None
    assert [found.token_id] == expected


def test_a_failed_sequence_leaves_nothing_that_harms_others(runner: ModelRunner) -> None:
    good = sequence("good", prompt(1, 6), [5, 6])
    expected = answer(runner, whole(good))
    # Keys and values that are not finite: what an overflow in the model leaves in the failing sequence's blocks.
    runner._cache[:, [7, 8]] = float("nan")
    bad = sequence("bad", prompt(3, 8), [7, 8])
    other = sequence("other", prompt(1, 6), [20, 21])
    failed, fine = runner.execute(StepPlan([Span(bad, 7, 1, sample=True), whole(other)], decodes=1))
    assert failed is not None
    assert failed.error is not None
    assert fine is not None
    assert [fine.token_id] == expected
    # The blocks go to another sequence, which fills the last of them only in part.
    assert answer(runner, whole(sequence("next", good.tokens, [7, 8]))) == expected
    grown = sequence("grown", good.tokens, [30, 7])
    assert answer(runner, Span(grown, 0, 4, sample=False), whole(good)) == [None, expected[0]]
    assert answer(runner, Span(grown, 4, 2, sample=True)) == expected


def scored(s: Sequence, start: int = 0, count: int | None = None) -> Span:
    """A span of the prompt that scores each position with a token of the prompt behind it."""
    end = len(s.tokens) if count is None else start + count
    last = end == len(s.tokens)
    return Span(s, start, end - start, sample=last, scored=range(start, end - 1 if last else end))


def run(runner: ModelRunner, *spans: Span) -> list[Sampled]:
    answers = [answer for answer in runner.execute(StepPlan(list(spans))) if answer is not None]
    assert len(answers) == len(spans)
    assert all(answer.error is None for answer in answers)
    return answers


def expected_entries(model: PreTrainedModel, tokens: list[int], k: int) -> list[LogprobEntry]:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    entries = []
    for row, token in zip(logits, tokens[1:], strict=False):
        logprobs = row.double().log_softmax(-1)
        order = row.argsort(descending=True).tolist()
        top = [(each, float(logprobs[each]), rank + 1, b"") for rank, each in enumerate(order[:k])]
        entries.append(LogprobEntry(token, float(logprobs[token]), order.index(token) + 1, top=top))
    return entries


def assert_alike(found: list[LogprobEntry], expected: list[LogprobEntry]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [(token, rank) for token, _, rank, _ in one.top] == [(token, rank) for token, _, rank, _ in other.top]
        assert [value for _, value, *_ in one.top] == pytest.approx([value for _, value, *_ in other.top], abs=1e-4)


@pytest.mark.parametrize("k", [0, 1, 20])
def test_prompt_logprobs_are_those_of_a_whole_forward_pass(
    runner: ModelRunner, reference: tuple[Path, PreTrainedModel], k: int
) -> None:
    s = sequence("a", prompt(4, 2 * SCORED_ROWS + 9), list(range(40)), prompt_logprobs=k)
    (whole_answer,) = run(runner, scored(s))
    assert_alike(whole_answer.prompt_logprobs, expected_entries(reference[1], s.tokens, k))
    assert whole_answer.token_id == answer(runner, whole(sequence("b", s.tokens, list(range(40)))))[0]


def test_more_candidates_than_the_vocabulary_has(tmp_path: Path, ops: Ops) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=12)
    runner = load_runner(tmp_path / "model", tmp_path / "cache", ops)
    s = sequence("a", [3, 11, 0, 5, 7], [0, 1], prompt_logprobs=20)
    (found,) = run(runner, scored(s))
    assert [len(entry.top) for entry in found.prompt_logprobs] == [12] * 4
    assert_alike(found.prompt_logprobs, expected_entries(model, s.tokens, 12))
    assert sum(math.exp(value) for _, value, *_ in found.prompt_logprobs[0].top) == pytest.approx(1.0)


@pytest.mark.parametrize("chunks", [[70, 67], [1, 1, 3, 64, 65, 3], [136, 1]])
def test_chunks_score_as_the_whole_prompt_does(
    runner: ModelRunner, reference: tuple[Path, PreTrainedModel], chunks: list[int]
) -> None:
    s = sequence("a", prompt(4, 137), list(range(40)), prompt_logprobs=3)
    found: list[LogprobEntry] = []
    start = 0
    for count in chunks:
        (part,) = run(runner, scored(s, start, count))
        assert (part.token_id is None) == (start + count < len(s.tokens))
        found += part.prompt_logprobs
        start += count
    assert_alike(found, expected_entries(reference[1], s.tokens, 3))


def test_scoring_spans_mix_with_others(runner: ModelRunner, reference: tuple[Path, PreTrainedModel]) -> None:
    tables = [list(range(20 * i, 20 * i + 20)) for i in range(4)]
    first = sequence("a", prompt(1, 70), tables[0], prompt_logprobs=2)
    plain = sequence("b", prompt(2, 9), tables[1])
    second = sequence("c", prompt(3, 40), tables[2], prompt_logprobs=0)
    late = sequence("d", prompt(5, 30), tables[3], prompt_logprobs=1)
    answer(runner, whole(plain))
    # The last takes up at position 10: what was scored elsewhere is not asked for again.
    run(runner, Span(late, 0, 30, sample=True))
    spans = [
        Span(plain, 8, 1, sample=True),
        scored(first),
        scored(second, 0, 25),
        Span(late, 10, 20, sample=True, scored=range(15, 29)),
    ]
    found = run(runner, *spans)
    assert found[0].prompt_logprobs == []
    assert found[2].token_id is None
    assert_alike(found[1].prompt_logprobs, expected_entries(reference[1], first.tokens, 2))
    assert_alike(found[2].prompt_logprobs, expected_entries(reference[1], second.tokens, 0)[:25])
    assert_alike(found[3].prompt_logprobs, expected_entries(reference[1], late.tokens, 1)[15:])


def test_logits_are_computed_some_rows_at_a_time_and_only_where_needed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    logits = runner._model.logits

    def counted(hidden: torch.Tensor, *rest: Any) -> BlockedLogits:
        rows.append(len(hidden))
        return logits(hidden, *rest)

    monkeypatch.setattr(runner._model, "logits", counted)
    a, b = (
        sequence(n, prompt(i, 137), list(range(40 * i, 40 * i + 40)), prompt_logprobs=1) for i, n in enumerate("ab")
    )
    run(runner, scored(a), Span(b, 0, 137, sample=False, scored=range(100, 120)))
    assert max(rows) <= SCORED_ROWS
    assert sum(rows) == (not runner._model.screens) + 136 + 20


def test_a_scored_row_that_is_not_finite_fails_its_span_alone(
    runner: ModelRunner, reference: tuple[Path, PreTrainedModel]
) -> None:
    runner._cache[:, [7, 8]] = float("nan")
    bad = sequence("bad", prompt(3, 8), [7, 8], prompt_logprobs=2)
    good = sequence("good", prompt(1, 6), [20, 21], prompt_logprobs=2)
    plain = sequence("plain", prompt(2, 6), [30, 31])
    half = Span(bad, 6, 1, sample=False, scored=range(6, 7))
    failed, fine, other = runner.execute(StepPlan([half, scored(good), whole(plain)]))
    assert failed is not None
    assert failed.error is not None
    assert failed.token_id is None
    assert other is not None
    assert other.error is None
    assert fine is not None
    assert fine.error is None
    assert_alike(fine.prompt_logprobs, expected_entries(reference[1], good.tokens, 2))
    # Its blocks are clean for whoever gets them next.
    (after,) = run(runner, scored(sequence("next", good.tokens, [7, 8], prompt_logprobs=2)))
    assert_alike(after.prompt_logprobs, fine.prompt_logprobs)


@pytest.mark.parametrize("ops", ["torch", "native"], indirect=True)
def test_each_pass_has_the_threads_of_its_share_and_gives_them_back(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    expected = answer(runner, whole(sequence("a", prompt(1, 9), [0, 1, 2])))
    seen: list[int] = []
    forward = runner._forward

    def watched(*args: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return forward(*args)

    class Share(CpuShare):
        def threads(self) -> int:
            return 1 + len(seen)

    monkeypatch.setattr(runner, "_forward", watched)
    monkeypatch.setattr(runner, "_share", Share(3))
    for _ in range(3):
        assert answer(runner, whole(sequence("a", prompt(1, 9), [0, 1, 2]))) == expected
        assert torch.get_num_threads() == before
    assert seen == [1, 2, 3]
    assert answer(runner) == []


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_pass_that_fails_gives_its_threads_back(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("no pass")

    class One(CpuShare):
        def threads(self) -> int:
            return 1

    before = torch.get_num_threads()
    monkeypatch.setattr(runner, "_forward", fail)
    monkeypatch.setattr(runner, "_share", One(2))
    with pytest.raises(RuntimeError, match="no pass"):
        runner.execute(StepPlan([whole(sequence("a", prompt(1, 9), [0, 1, 2]))], decodes=0))
    assert torch.get_num_threads() == before
