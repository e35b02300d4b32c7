"""Greedy tokens without all logits: which rows get them so, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import runner as runner_module
from engine.config import EngineConfig
from engine.models.registry import CausalLM
from engine.plan import Sampled, Span, StepPlan
from engine.runner import ModelRunner
from engine.sampler import takes_argmax
from engine.sequence import Sequence
from kernels.ops import ops_for
from shared.sampling import SamplingParams
from tests.support.native import load_native
from tests.support.tiny_llama import VOCAB, save_tiny_model
from tests.unit.engine_model.test_runner import load_runner

#: Rows of all kinds, and whether an arg-max is enough.
OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"logprobs": 2}, False),
    ({"logprobs": 0}, False),
    ({"temperature": 0.8}, False),
    ({"logit_bias": {3: 5.0}}, False),
    ({"bad_words": ["w7"]}, False),
    ({"allowed_token_ids": [4, 5]}, False),
    ({"min_tokens": 3}, False),
    ({"repetition_penalty": 1.5}, False),
    ({"stop": ["w1"], "ignore_eos": True, "max_tokens": 5}, True),
    ({}, True),
]


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    load_native()
    save_tiny_model(tmp_path / "tiny")
    loaded = load_runner(tmp_path / "tiny", tmp_path, ops_for("cpu", native=True))
    loaded._model.screen_head()
    if not loaded._model.screens:
        pytest.skip("matrices are not screened on this CPU")
    return loaded


def sequences() -> list[Sequence]:
    rows = []
    for index, (options, _) in enumerate(OPTIONS):
        params = SamplingParams(**({"temperature": 0.0} | options))
        tokens = [(index * 31 + i * 7) % VOCAB for i in range(5 + index)]
        rows.append(
            Sequence(
                str(index), 0, params, 7, tokens, len(tokens), 300, block_table=list(range(4 * index, 4 * index + 4))
            )
        )
    return rows


def answers(runner: ModelRunner, rows: list[Sequence]) -> list[Sampled | None]:
    return runner.execute(StepPlan([Span(row, 0, len(row.tokens), sample=True) for row in rows]))


def counted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass over the screened matrix."""
    rows: list[int] = []
    greedy = runner._model.greedy

    def count(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return greedy(hidden)

    monkeypatch.setattr(runner._model, "greedy", count)
    return rows


def test_which_rows_take_an_argmax() -> None:
    assert [takes_argmax(row) for row in sequences()] == [enough for _, enough in OPTIONS]


@pytest.mark.parametrize("least", [1, 4])
def test_a_mixed_batch_has_the_same_answers(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(runner_module, "SCREENED_ROWS", least)
    rows, passes = sequences(), counted(runner, monkeypatch)
    found = answers(runner, rows)
    # Too few of them for a pass of their own, where others take all logits.
    assert passes == ([3] if least == 1 else [])
    runner._model.screens = False
    assert found == answers(runner, rows)
    assert all(answer is not None and answer.error is None for answer in found)


def test_a_batch_of_greedy_rows_needs_no_logits(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in sequences() if takes_argmax(row)]
    runner._model.screens = False
    expected = answers(runner, rows)
    runner._model.screens = True
    monkeypatch.setattr(runner._model, "logits", None)
    assert answers(runner, rows) == expected
    assert answers(runner, rows[1:2]) == expected[1:2]


def test_rows_that_are_left_get_their_logits(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in sequences() if takes_argmax(row)]
    expected = answers(runner, rows)

    def all_but_the_first(hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor([expected[0].token_id if expected[0] else -1] + [-1] * (len(hidden) - 1))

    monkeypatch.setattr(runner._model, "greedy", all_but_the_first)
    assert answers(runner, rows) == expected


def test_adapters_of_the_output_matrix_need_all_logits(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slots:
        changed = False

        def changes(self, site: str) -> bool:
            return self.changed and site == "lm_head"

        def batch(self, slots: object) -> None:
            return None

    monkeypatch.setattr(runner, "_adapters", Slots())
    passes = counted(runner, monkeypatch)
    rows = [row for row in sequences() if takes_argmax(row)]
    for changed, slot, screened in ((False, 0, 3), (True, 0, 0), (True, -1, 3)):
        passes.clear()
        Slots.changed = changed
        rows[0].adapter_slot = slot
        answers(runner, rows)
        assert sum(passes) == screened


def test_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine.build import build_engine

    load_native()
    save_tiny_model(tmp_path / "tiny")
    asked: list[CausalLM] = []
    monkeypatch.setattr("engine.models.llama.LlamaModel.screen_head", lambda model: asked.append(model))
    for wanted in (True, False):
        asked.clear()
        build_engine(
            EngineConfig(
                str(tmp_path / "tiny"), num_blocks=4, device="cpu", screen_head=wanted, cache_dir=tmp_path / "c"
            )
        )
        assert bool(asked) == wanted
