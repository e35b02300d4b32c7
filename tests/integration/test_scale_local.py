"""A pool that sleeps, is woken by one request, grows, and shrinks under open streams."""

from __future__ import annotations

import pytest

from benchmarks.scale_local import Plan, run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_request_wakes_a_pool_and_no_stream_is_cut_when_it_shrinks() -> None:
    figures = run(Plan(workers=3, burst=24, burst_tokens=60, long=12, long_tokens=700)).figures
    assert figures["replicas_max"] >= 2
    assert figures["moved"] >= 1
    assert (figures["streams"], figures["cut"], figures["different"], figures["asleep"]) == (37, 0, 0, 1)
