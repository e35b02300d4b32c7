"""Every metric that a process exports, by name."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from gateway.metrics import GatewayMetrics
from gateway.pool_metrics import PoolCollector
from shared.task_metrics import TaskQueueCollector
from tasks.metrics import TasksMetrics
from worker.metrics import WorkerMetrics


def families() -> Iterator[Metric]:
    """Of gateway, worker and tasks."""
    yield from GatewayMetrics().registry.collect()
    yield from PoolCollector(None).describe()  # type: ignore[arg-type]
    yield from WorkerMetrics("m").registry.collect()
    yield from TasksMetrics().registry.collect()
    yield from TaskQueueCollector("redis://127.0.0.1", looks=False).describe()


def names() -> set[str]:
    """Ropeway's own, without the endings of samples."""
    return {family.name for family in families() if family.name.startswith("ropeway_")}


def sample_names() -> set[str]:
    """What a query can ask for."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {family.name + end for family in families() for end in endings.get(family.type, ("",))}
