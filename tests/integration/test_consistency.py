"""A small part of `benchmarks.consistency`: in deterministic mode an answer depends on its request alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from benchmarks import consistency
from benchmarks.consistency import CONTEXT, Comparison, compare, comparisons
from benchmarks.engines import Engines
from benchmarks.mixed import Answer, Answered, mixed_cases
from engine.request import LogprobEntry, RequestUsage

REQUESTS = 6


@pytest.mark.model
@pytest.mark.usefixtures("two_threads")
def test_every_run_gives_the_same_bits() -> None:
    engines = Engines.load("float32", deterministic=True, max_model_len=CONTEXT)
    cases = mixed_cases(engines.tokenizer(), REQUESTS, shortest=8, longest=12)
    found = {comparison.run: comparison for comparison in comparisons(engines, cases)}
    assert set(found) == {
        "together", "preempted", "prefix cache, cold", "prefix cache, warm", "in chunks", "taken up",
    }  # fmt: skip
    assert [c for c in found.values() if (c.same, c.difference, c.exact) != (1.0, 0.0, True)] == []


def answer(**fields: object) -> Answer:
    said = Answered([5, 6], "ab", [_entry(5, -0.5), _entry(6, -0.25)], "length")
    return Answer({0: replace(said, **fields)}, [_entry(3, -1.0)], RequestUsage(2, 2, 0))  # type: ignore[arg-type]


def _entry(token: int, logprob: float) -> LogprobEntry:
    return LogprobEntry(token, logprob, 1, b"", [(token, logprob, 1, b""), (9, -4.0, 2, b"")])


def against(other: Answer) -> Comparison:
    return compare("run", {"r": answer()}, {"r": other})


def test_a_comparison_sees_every_kind_of_difference() -> None:
    assert against(answer()) == Comparison("run", 1.0, 0.0, True)
    assert against(answer(text="ax")).same == 0
    assert against(answer(finish_reason="stop")).same == 0
    assert against(answer(token_ids=[5, 7])).same == 0
    assert against(answer(logprobs=[_entry(5, -0.5), _entry(6, -0.75)])).difference == 0.5
    # Only what stands behind equal tokens is compared.
    assert against(answer(token_ids=[4, 6], logprobs=[_entry(4, -0.5), _entry(6, -0.75)])).difference == 0
    other = answer()
    other.prompt_logprobs = [_entry(3, -1.125)]
    assert against(other) == Comparison("run", 1.0, 0.125, False)
    other = answer()
    other.usage = RequestUsage(2, 3, 0)
    assert against(other).same == 0


@pytest.mark.parametrize("exact", [True, False])
def test_the_command_fails_where_deterministic_mode_differs(
    exact: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default mode may differ; its rate is printed."""

    class NoModel:
        def tokenizer(self) -> None:
            return None

    monkeypatch.setattr(Engines, "load", lambda *args, **kwargs: NoModel())
    monkeypatch.setattr(consistency, "mixed_cases", lambda *args: [])
    found = [Comparison("prefix cache, warm", 1.0 if exact else 0.5, 0.0 if exact else 0.25, exact, "n")]
    monkeypatch.setattr(consistency, "comparisons", lambda *args: iter(found))
    figures = tmp_path / "figures.json"
    consistency.main(dtype="float32", deterministic=False, requests=2, json_file=figures)
    assert json.loads(figures.read_text()) == {
        "float32_default_prefix_cache_warm_same": found[0].same,
        "float32_default_prefix_cache_warm_max_diff": found[0].difference,
    }
    assert ("100.0%" if exact else "50.0%") in capsys.readouterr().out
    if exact:
        consistency.main(dtype="float32", deterministic=True, requests=2)
    else:
        with pytest.raises(typer.Exit) as caught:
            consistency.main(dtype="float32", deterministic=True, requests=2)
        assert caught.value.exit_code == 1
