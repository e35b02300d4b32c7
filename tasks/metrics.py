"""Metrics of one tasks process, in a registry of its own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.adapter_record import AdapterRecord
from shared.metrics import NAMESPACE
from tasks.batch_metrics import BatchCollector
from tasks.webhook_metrics import WebhookMetrics


class TasksMetrics:
    """What the keeper sees and does. Tasks themselves run in processes that are too short-lived to be asked."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.adapters = Gauge(
            "adapters_registered", "Names of adapters, by what became of their last load", ["state"],
            namespace=NAMESPACE, registry=r,
        )  # fmt: skip
        self._states = {state: self.adapters.labels(state) for state in ("serving", "loading", "failed")}
        self.restarted = Counter(
            "tasks_restarted_loads",
            "Loads begun anew because whoever was at them died",
            namespace=NAMESPACE,
            registry=r,
        )
        self.hung = Counter(
            "tasks_hung",
            "Processes of tasks killed because they gave no sign of life; their tasks are begun anew",
            namespace=NAMESPACE,
            registry=r,
        )
        self.deleted = Counter(
            "tasks_deleted_adapters", "Contents deleted that nobody wanted any more", namespace=NAMESPACE, registry=r
        )
        self.errors = Counter(
            "tasks_keeper_errors", "Rounds of upkeep that something kept from ending", namespace=NAMESPACE, registry=r
        )
        self.batches = BatchCollector()
        r.register(self.batches)
        self.webhooks = WebhookMetrics()
        r.register(self.webhooks)

    def records(self, records: Sequence[AdapterRecord]) -> None:
        """Count names: `serving`, `loading` for the first time, `failed` to."""
        states = [
            "serving" if record.content is not None else "loading" if record.pending is not None else "failed"
            for record in records
        ]
        for state, gauge in self._states.items():
            gauge.set(states.count(state))
