"""docs/metrics.md and the registries say the same."""

from __future__ import annotations

import re

from tests.deploy.chart import ROOT
from tests.support import metric_names

TEXT = (ROOT / "docs" / "metrics.md").read_text("utf-8")
OURS = re.compile(r"ropeway_[a-z0-9_]+")


def rows() -> list[list[str]]:
    """Cells of the table of vLLM's names."""
    table = TEXT.partition("## From vLLM")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_metric_is_described_and_nothing_else_is() -> None:
    described = set(OURS.findall(re.sub(r"rate\([^)]*\)", "", TEXT)))
    assert described == metric_names.names()


def test_every_vllm_name_has_one_of_ours_or_a_reason() -> None:
    theirs: list[str] = []
    for vllm, here, remark in rows():
        theirs += re.findall(r"`([a-z_:]+)`", vllm)
        assert (here == "none" and remark) or OURS.fullmatch(here.strip("`")), vllm
    assert len(theirs) == len(set(theirs)) and len([name for name in theirs if name.startswith("vllm:")]) >= 35


def test_what_has_the_same_meaning_has_the_same_name() -> None:
    types = {family.name: family.type for family in metric_names.families()}
    same = [vllm for vllm, here, _ in rows() if vllm.replace("vllm:", "ropeway_") == here]
    assert len(same) >= 24
    for name in (name.strip("`").replace("vllm:", "ropeway_") for name in same):
        assert not name.endswith("_seconds") or types[name] == "histogram", name
    for counter in ("prompt_tokens", "generation_tokens", "request_success", "num_preemptions"):
        assert types[f"ropeway_{counter}"] == "counter"
