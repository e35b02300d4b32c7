"""Seconds from one token to the next: a histogram that may be written for every row of every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shared.metrics import NAMESPACE, TPOT_BUCKETS

#: vLLM's name, and the one that it had before.
NAMES: Final = ("inter_token_latency_seconds", "time_per_output_token_seconds")


class TokenIntervals(Collector):
    """One thread adds; any may read. The library's own histogram takes a lock for each value."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(TPOT_BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float, tokens: int = 1) -> None:
        """Tokens that came so long after those before them, each."""
        self._counts[bisect_left(TPOT_BUCKETS, seconds)] += tokens
        self._sum += seconds * tokens

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The same under both names."""
        total, counts = self._sum, list(accumulate(self._counts))
        bounds = [*map(floatToGoString, TPOT_BUCKETS), "+Inf"]
        for name in NAMES:
            family = HistogramMetricFamily(
                f"{NAMESPACE}_{name}", "From one token to the next of an answer.", labels=["model_name"]
            )
            family.add_metric([self._model], list(zip(bounds, counts, strict=True)), total)
            yield family
