"""Metrics of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.batches import BatchesOverview
from shared.metrics import NAMESPACE

_OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")
_ENDED: Final = ("completed", "failed", "expired", "cancelled")


class BatchCollector(Collector):
    """Batches as Redis last counted them, the same at every tasks process.

    Attributes:
        overview: what was last read.
    """

    def __init__(self) -> None:
        self.overview = BatchesOverview()

    def collect(self) -> Iterator[Metric]:
        """The families, all labels known in advance."""
        now = self.overview
        batches = GaugeMetricFamily(f"{NAMESPACE}_batches", "Batches that have not ended, by state", labels=["state"])
        for state in _OPEN:
            batches.add_metric([state], now.open[state])
        yield batches
        yield GaugeMetricFamily(
            f"{NAMESPACE}_batch_lines_in_flight", "Lines of batches that are queued or running", value=now.in_flight
        )
        ended = CounterMetricFamily(f"{NAMESPACE}_batches_ended", "Batches that ended, by status", labels=["status"])
        lines = CounterMetricFamily(
            f"{NAMESPACE}_batch_lines", "Lines of batches that ended, by outcome", labels=["outcome"]
        )
        for name in _ENDED:
            ended.add_metric([name], now.ended[name])
            lines.add_metric([name], now.lines[name])
        yield ended
        yield lines
