"""The simulated pool loses nothing, and shows what settings differ in."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import autoscale
from benchmarks.autoscale import CHART, Outcome, Pool, needed, queued, traffic
from benchmarks.scaling_rules import Direction, Policy

#: Half an hour around noon, in which bursts come.
ARRIVALS = traffic(0.5, seed=1)[-1800:]


def run(rules: autoscale.Rules = CHART, figure: autoscale.Figure | None = None) -> Outcome:
    arrivals = [[replace(job, submitted=now) for job in second] for now, second in enumerate(ARRIVALS)]
    return Pool(rules, figure or needed(10)).run(arrivals)


def test_every_job_is_started_once_and_ends() -> None:
    jobs = [job for second in ARRIVALS for job in second]
    restless = replace(CHART, down=Direction(0, (Policy("Percent", 100, 15),)))
    for rules, figure in ((CHART, needed(10)), (restless, queued)):
        outcome = run(rules, figure)
        assert len(outcome.waits) == len(jobs) and min(outcome.waits) >= 0
        assert outcome.generated == sum(job.output for job in jobs)
    assert outcome.handed > 0 and outcome.again > outcome.handed


def test_more_workers_wait_less_and_cost_more() -> None:
    always = run(replace(CHART, min_replicas=CHART.max_replicas)).figures()
    chart = run().figures()
    assert always["wait_s_p99"] < chart["wait_s_p99"]
    assert always["worker_hours"] > chart["worker_hours"]
    assert chart["wakes"] == 1


def test_the_same_seed_gives_the_same_traffic() -> None:
    assert traffic(0.3, 3) == traffic(0.3, 3) != traffic(0.3, 4)
