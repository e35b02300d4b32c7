"""A batch beside interactive streams, small: through the simulated engine, and through the real model."""

from __future__ import annotations

import pytest

from benchmarks.batch_beside import Plan, measure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "plan",
    [
        Plan("sim", lines=150, tokens=4, streams=1, alone=4),
        pytest.param(Plan(lines=20, tokens=4, streams=1, alone=4), marks=pytest.mark.model),
    ],
    ids=["sim", "model"],
)
async def test_each_line_is_answered_once_and_streams_go_on(plan: Plan) -> None:
    figures = await measure(plan)  # raises where a custom id is missing or there twice, or a line has run twice
    assert (figures["lines"], figures["jobs_run"], figures["failed_lines"]) == (plan.lines, plan.lines, 0)
    assert figures["streams_beside"] >= 1
    assert 0 < figures["gateway_rss_mb"] < 300 and 0 < figures["tasks_mb"] < 300
