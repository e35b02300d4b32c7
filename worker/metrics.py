"""The worker's metrics, under the field's usual names with the prefix `ropeway_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from engine.request import AdapterStats, EngineStats
from shared.metrics import NAMESPACE, TTFT_BUCKETS
from shared.protocol import JobStatus, Timings, Usage
from worker.request_metrics import Asked, RequestMetrics
from worker.token_intervals import TokenIntervals


class WorkerMetrics:
    """One registry per worker, so that two of them fit into one process."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        labels = {"registry": self.registry, "labelnames": ["model_name"]}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{NAMESPACE}_{name}", text, **labels).labels(model)  # type: ignore[arg-type]

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{NAMESPACE}_{name}", text, **labels).labels(model)  # type: ignore[arg-type]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{NAMESPACE}_{name}", text, buckets=buckets, **labels).labels(model)  # type: ignore[arg-type]

        self.running = gauge("num_requests_running", "Sequences in the batch.")
        self.waiting = gauge("num_requests_waiting", "Sequences in the engine that wait for a place in the batch.")
        self.held = gauge("num_jobs_held", "Jobs in this worker's hands.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks that sequences hold; 1 is all.")
        self.backlog = gauge("publish_backlog_bytes", "About how many bytes wait for Redis.")
        self.steps = counter("engine_steps", "Steps of the engine.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began, cached ones too.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.prefix_hit_rate = gauge("prefix_cache_hit_rate", "Hits over queries of the most recent 1000 requests.")
        self.preemptions = counter("num_preemptions", "Sequences that gave their blocks back and were computed again.")
        self.step_failures = counter("engine_step_failures", "Steps that raised.")
        self.pulled = counter("jobs_pulled", "Jobs taken from the queue.")
        self.redeliveries = counter("redeliveries", "Jobs taken over from another worker whose lease had run out.")
        self.resumed = counter("jobs_resumed", "Jobs taken up in the middle of their answer.")
        self.released = counter("jobs_released", "Jobs handed back to the queue.")
        self.fenced = counter("fenced_publishes", "Jobs of which a publish or a renewal was refused: another had them.")
        self.publish_errors = counter("publish_errors", "Publishes that failed and were tried again.")
        self.redis_errors = counter("redis_errors", "Failed calls of intake, registry and lease.")
        self.dead_letters = counter("dead_letters", "Jobs given up here: dead letters now.")
        self.kv_blocks = gauge("kv_cache_blocks", "Blocks of the KV cache.")
        self.requests = RequestMetrics(model, self.registry)
        self.intervals = TokenIntervals(model)
        self.registry.register(self.intervals)
        self.adapter_slots = gauge("adapter_slots", "Slots for adapters on the device; 0: none are served.")
        self.adapters_resident = gauge("adapters_resident", "Adapters in slots on the device.")
        self.adapters_in_memory = gauge("adapters_in_memory", "Adapters in memory, in a slot or not.")
        self.adapters_loading = gauge("adapters_loading", "Adapters that are wanted and not yet in memory.")
        self.adapter_loads = counter("adapter_loads", "Adapters that came into memory.")
        self.adapter_load_failures = counter("adapter_load_failures", "Adapters that could not be read.")
        self.adapter_load_time = histogram(
            "adapter_load_seconds", "From the first request for an adapter until it was in memory.", TTFT_BUCKETS
        )
        self.adapter_fills = counter("adapter_slot_fills", "Adapters brought to a slot.")
        self.adapter_evictions = counter("adapter_slot_evictions", "Adapters that left a slot.")
        requests = Gauge(
            f"{NAMESPACE}_adapter_requests",
            "Requests of adapters: loading wait for memory, waiting for a slot or blocks, running are in the batch.",
            ["model_name", "state"],
            registry=self.registry,
        )
        self._adapter_requests = {state: requests.labels(model, state) for state in ("loading", "waiting", "running")}
        self._last = EngineStats()

    def ended(self, status: JobStatus, usage: Usage, timings: Timings, asked: Asked | None = None) -> None:
        """A job's last frame is published."""
        self.requests.ended(status, usage, timings, asked or Asked(longest=usage.completion_tokens))

    def engine(self, stats: EngineStats) -> None:
        """Take over the engine's snapshot. Called by the engine's thread alone."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_usage.set(stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0)
        self.kv_blocks.set(stats.total_blocks)
        last = self._last
        self.steps.inc(stats.steps - last.steps)
        self.prompt_tokens.inc(stats.prompt_tokens - last.prompt_tokens)
        self.generation_tokens.inc(stats.generated_tokens - last.generated_tokens)
        self.prefix_hits.inc(stats.prefix_hit_tokens - last.prefix_hit_tokens)
        self.prefix_queries.inc(stats.prefix_query_tokens - last.prefix_query_tokens)
        self.prefix_hit_rate.set(stats.prefix_hit_rate)
        self.preemptions.inc(stats.preemptions - last.preemptions)
        self._of_adapters(stats.adapters, last.adapters)
        self._last = stats

    def _of_adapters(self, stats: AdapterStats, last: AdapterStats) -> None:
        self.adapter_slots.set(stats.slots)
        self.adapters_resident.set(len(stats.resident))
        self.adapters_in_memory.set(len(stats.in_memory))
        self.adapters_loading.set(len(stats.loading))
        loads = stats.loads - last.loads
        self.adapter_loads.inc(loads)
        for seconds in stats.load_seconds[max(0, len(stats.load_seconds) - loads) :]:
            self.adapter_load_time.observe(seconds)
        self.adapter_load_failures.inc(stats.load_failures - last.load_failures)
        self.adapter_fills.inc(stats.fills - last.fills)
        self.adapter_evictions.inc(stats.evictions - last.evictions)
        self._adapter_requests["loading"].set(stats.loading_requests)
        self._adapter_requests["waiting"].set(stats.waiting_requests)
        self._adapter_requests["running"].set(stats.running_requests)
