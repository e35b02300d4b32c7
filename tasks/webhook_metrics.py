"""Webhooks for Prometheus. What is counted is counted in Redis, since whoever sends them may die; all processes say the
same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared.metrics import NAMESPACE

#: How webhooks end, and how tries of them do: as `shared.webhooks.Webhooks.count` is told.
ENDS: Final = ("delivered", "gone", "failed", "lost")
TRIES: Final = ("delivered", "gone", "answered", "timeout", "connection", "tls", "address")


class WebhookMetrics(Collector):
    """What was last seen in Redis; zeros before."""

    def __init__(self) -> None:
        self._pending, self._age_s = 0, 0.0
        self._counts: Mapping[str, int] = {}

    def saw(self, pending: int, age_s: float, counts: Mapping[str, int]) -> None:
        """Take in what a look has shown: webhooks that are owed, the age of the oldest, and what was counted ever."""
        self._pending, self._age_s, self._counts = pending, age_s, counts

    def collect(self) -> Iterator[Metric]:
        """The samples."""
        counts = self._counts
        ends = CounterMetricFamily(f"{NAMESPACE}_webhooks", "Webhooks by how they ended", labels=["outcome"])
        for end in ENDS:
            ends.add_metric([end], counts.get(end, 0))
        tries = CounterMetricFamily(
            f"{NAMESPACE}_webhook_tries", "Tries of webhooks by how they ended", labels=["outcome"]
        )
        for outcome in TRIES:
            tries.add_metric([outcome], counts.get(f"try:{outcome}", 0))
        yield ends
        yield tries
        yield GaugeMetricFamily(f"{NAMESPACE}_webhooks_pending", "Webhooks that are not delivered yet", self._pending)
        yield GaugeMetricFamily(
            f"{NAMESPACE}_webhook_oldest_seconds",
            "Seconds since the end of the job whose webhook is owed longest",
            self._age_s,
        )
