"""Ratios, shares and turns of the comparison with peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peer_figures
from benchmarks.peer_contenders import Work, measure, read_workload


def sample(batch: float, single: float, ttft: float) -> dict[str, float]:
    return {"tok_s": batch, "single_tok_s": single, "ttft_ms": ttft}


def test_ratios_are_those_of_one_round() -> None:
    # The machine was twice as fast in the second round and three times in the third; the ratio never changed.
    ours = [sample(100 * k, 30 * k, 12 / k) for k in (1, 2, 3)]
    theirs = [sample(50 * k, 10 * k, 24 / k) for k in (1, 2, 3)]
    figures = peer_figures.ratios({"ropeway": ours, "peer": theirs})
    assert figures == {
        "ratio_peer": pytest.approx(2),
        "ratio_peer_single": pytest.approx(3),
        "ratio_peer_ttft": pytest.approx(2),
    }
    assert peer_figures.absolute({"peer": theirs}) == {
        "peer_tok_s": 100,
        "peer_single_tok_s": 20,
        "peer_ttft_ms": 12,
    }


def test_an_engine_without_all_rounds_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        peer_figures.ratios({"ropeway": [sample(1, 1, 1)] * 2, "peer": [sample(1, 1, 1)]})


def test_everyone_comes_first_in_turn() -> None:
    names = ["ropeway", "a", "b"]
    orders = [peer_figures.in_turns(names, number) for number in range(3)]
    assert orders == [["ropeway", "a", "b"], ["a", "b", "ropeway"], ["b", "ropeway", "a"]]
    assert peer_figures.in_turns(names, 3) == orders[0]


def test_bandwidth_is_the_share_of_one_stream() -> None:
    figures = peer_figures.bandwidth([sample(900, 100, 50)], [50e9], 250e6)
    assert figures == {"bandwidth_gb_s": 50, "bandwidth_fraction": pytest.approx(0.5)}


def test_neighbour_is_the_share_that_is_kept() -> None:
    figures = peer_figures.neighbour([sample(100, 50, 1), sample(200, 100, 1)], [sample(50, 30, 2), sample(90, 60, 2)])
    assert figures["neighbour_fraction"] == pytest.approx(0.475)
    assert figures["neighbour_fraction_single"] == pytest.approx(0.6)
    assert figures["neighbour_tok_s"] == 70


def test_servers_are_compared_by_time() -> None:
    figures = peer_figures.servers({"ropeway": [(2.0, 0.05)], "vllm": [(4.0, 0.1)]}, 2048)
    assert figures == {
        "ropeway_http_tok_s": 1024,
        "ropeway_http_ttft_ms": pytest.approx(50),
        "vllm_http_tok_s": 512,
        "vllm_http_ttft_ms": pytest.approx(100),
        "ratio_vllm_http": 2,
        "ratio_vllm_http_ttft": pytest.approx(2),
    }


class _Clock:
    """A contender whose times are known."""

    name, version = "clock", "1"

    def __init__(self) -> None:
        self._singles = iter([(0.1, 1.0), (0.3, 9.0), (0.2, 2.0)])

    def batch(self) -> float:
        return 0.5

    def single(self) -> tuple[float, float]:
        return next(self._singles)

    def close(self) -> None:
        """Nothing runs."""


def test_a_round_takes_medians_of_the_single_stream() -> None:
    work = Work([[1, 2], [3, 4, 5]], new_tokens=5, single=1)
    assert measure(_Clock(), work) == {"tok_s": 20, "single_tok_s": 2, "ttft_ms": 200}


@pytest.mark.parametrize(("prompts", "new_tokens"), [([], 4), ([[1], []], 4), ([[1]], 4), ([[1], [2]], 1)], ids=str)
def test_work_that_cannot_be_measured_is_refused(prompts: list[list[int]], new_tokens: int) -> None:
    with pytest.raises(ValueError, match="workload"):
        Work(prompts, new_tokens, single=1)


def test_a_workload_file_is_lists_of_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "workload.json"
    file.write_text("[[1, 2], [3]]")
    assert read_workload(file) == [[1, 2], [3]]
    for bad in ({"a": 1}, [1], [[1], []], [[1.5]], [[True]], [[-1]], [["a"]]):
        file.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=r"workload\.json"):
            read_workload(file)
