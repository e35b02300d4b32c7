"""Pools' loads for Prometheus: from the gateway, which is there while no worker is, with zeros while nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.pool_state import PoolState, PoolStates
from shared.metrics import NAMESPACE

#: A look that is older says nothing: while Redis is away there are no samples, so that nobody takes them for zeros.
FRESH_S: Final = 15.0
_COUNTERS: Final = {
    "queued_jobs": "Jobs that wait for a worker",
    "queued_tokens": "Tokens of jobs that wait, prompts and max_tokens",
    "running_jobs": "Jobs that workers have",
    "running_tokens": "Tokens of jobs that workers have, prompts and max_tokens",
}


class PoolCollector(Collector):
    """Reads what the gateway last saw; asks Redis nothing. All gateways say the same of a pool."""

    def __init__(self, states: PoolStates) -> None:
        self._states = states

    def describe(self) -> list[GaugeMetricFamily]:
        """Names without samples, so that registering reads nothing."""
        return list(_families().values())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample per pool, and per class where there are any."""
        families = _families()
        for name in self._states.names():
            state = self._states.last(name, FRESH_S)
            if state is not None:
                _add(families, state)
        yield from families.values()


def _families() -> dict[str, GaugeMetricFamily]:
    def family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=["pool", *labels])

    return {
        **{name: family(name, text, "class") for name, text in _COUNTERS.items()},
        "workers": family("workers", "Workers that live; busy ones are among the ready", "state"),
        "needed_workers": family("needed_workers", "Full workers that there is work for"),
        "pool_drain_tokens_per_second": family("pool_drain_tokens_per_second", "Tokens of jobs that end per second"),
        "pool_run_seconds": family("pool_run_seconds", "Seconds that a job runs, weighted by its tokens"),
        "pool_paused": family("pool_paused", "1 while the pool is paused"),
    }


def _add(families: dict[str, GaugeMetricFamily], state: PoolState) -> None:
    for job_class, load in state.classes.items():
        for name in _COUNTERS:
            families[name].add_metric([state.pool, job_class], getattr(load, name))
    for kind, count in state.workers.items():
        families["workers"].add_metric([state.pool, kind], count)
    families["needed_workers"].add_metric([state.pool], state.needed)
    families["pool_drain_tokens_per_second"].add_metric([state.pool], state.drain)
    families["pool_run_seconds"].add_metric([state.pool], state.run_s)
    families["pool_paused"].add_metric([state.pool], float(state.paused))
