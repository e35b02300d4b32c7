"""The runner over a model of known outputs: rows, answers, copies, and what a failed sequence leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loading.resolve import load
from engine.models.config import ModelConfig
from engine.models.registry import model_class
from engine.plan import Span, StepPlan
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import ops_for
from shared.sampling import SamplingParams
from tests.support.tiny_llama import VOCAB, save_tiny_model

BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model(path)
    return path


@pytest.fixture
def runner(folder: Path, tmp_path: Path) -> ModelRunner:
    checkpoint = load(str(folder), tmp_path)
    config = ModelConfig.from_hf(checkpoint.config)
    ops = ops_for("cpu")
    model = model_class("LlamaForCausalLM")(config, checkpoint.tensors, ops, torch.device("cpu"), torch.float32, 128)
    return ModelRunner(model, Sampler(ops, lambda text: []), ops, num_blocks=40, block_size=BLOCK)


def sequence(name: str, tokens: list[int], table: list[int]) -> Sequence:
    return Sequence(name, 0, SamplingParams(temperature=0), 0, tokens, len(tokens), 100, block_table=table)


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


def test_no_adapter_is_served(runner: ModelRunner) -> None:
    assert not runner.has_adapter("any")


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
