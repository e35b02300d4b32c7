"""The prefix cache's hit rate: counters for ever, the rate over the most recent requests."""

from __future__ import annotations

import pytest

from engine.hit_rate import RECENT, HitRate


def test_the_rate_looks_back_on_recent_requests_only() -> None:
    rate = HitRate()
    assert rate.recent == 0.0
    for _ in range(RECENT):
        rate.add(10, 0)
    assert rate.recent == 0.0
    for _ in range(RECENT // 2):
        rate.add(10, 8)
    assert rate.recent == pytest.approx(0.4)
    for _ in range(RECENT):
        rate.add(30, 15)
    assert rate.recent == pytest.approx(0.5)
    assert (rate.queries, rate.hits) == (RECENT * 45, RECENT * 19)
