"""A small pool under fire, with fixed seeds: what clients see is what an undisturbed pool gives."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.chaos.plan import WEIGHTS
from tests.support.chaos.run import Config, plan_of, run

SEEDS = (36, 44)


def config(seed: int) -> Config:
    """Short jobs and short leases."""
    return Config(
        seed=seed,
        jobs=60,
        disturbances=12,
        clients=10,
        tokens=(20, 80),
        step_ms=15.0,
        lanes=4,
        lease_s=1.0,
        grace_s=0.2,
        step_timeout_s=1.5,
        alone=0.0,
    )


def test_the_seeds_bring_every_disturbance_and_every_kind_of_client() -> None:
    plans = [plan_of(config(seed)) for seed in SEEDS]
    assert {disturbance.kind for plan in plans for disturbance in plan.disturbances} == set(WEIGHTS)
    orders = [order for plan in plans for order in plan.orders]
    assert Counter(order.way for order in orders).keys() == {"stream", "whole", "follow", "library", "fetch"}
    assert len({order.adapter for order in orders}) > 10
    for trait in ("key", "cancel_at", "breaks", "leaves_at", "comes_back"):
        assert any(getattr(order, trait) for order in orders), trait
    for field in ("n", "stop", "logprobs", "seed", "min_tokens"):
        assert any(field in order.sampling for order in orders), field


def test_a_seed_gives_the_same_plan_again() -> None:
    assert plan_of(config(1)) == plan_of(config(1)) != plan_of(config(2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_lost_doubled_or_different(seed: int) -> None:
    report = await run(config(seed), plan_of(config(seed)))
    assert not report.faults, "\n".join(map(str, report.faults))
    assert not report.leftovers, "\n".join(report.leftovers)
    assert not report.crashes, "\n".join(report.crashes)
    assert (report.jobs, len(report.hits)) == (60, 12)
