"""What waits in the queues of background tasks, for Prometheus: from tasks processes and, while none of them runs, from
gateways."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import redis
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.connect import connect_sync
from shared.errors import RopewayError
from shared.metrics import NAMESPACE
from shared.redis_errors import TROUBLE
from shared.task_queue import QUEUE, WEBHOOK_QUEUE

if TYPE_CHECKING:
    from rq import Queue

#: Queues by what they are called here.
_QUEUES: Final = {"tasks": QUEUE, "webhooks": WEBHOOK_QUEUE}
_STATES: Final = ("waiting", "scheduled", "running", "failed")
#: Seconds that Redis has for an answer: whoever asks for metrics does not wait for long.
_ANSWER_S: Final = 1.0
#: A look that is older says nothing: without samples nobody takes them for zeros.
_FRESH_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class _State:
    """Tasks by state, and seconds that the first of those that wait has waited."""

    tasks: tuple[int, ...]
    oldest_s: float


class TaskQueueCollector(Collector):
    """The same from every process that asks.

    Args:
        url: see `shared.task_queue.tasks_url`.
        looks: whether Redis is asked whenever metrics are; else only by `look`, for who must not wait.
    """

    def __init__(self, url: str, *, looks: bool) -> None:
        self._url, self._looks = url, looks
        self._lock = threading.Lock()
        self._queues: dict[str, Queue] = {}
        self._states: dict[str, _State] = {}
        self._looked_at = -_FRESH_S

    def describe(self) -> list[GaugeMetricFamily]:
        """Names without samples, so that registering reads nothing."""
        return list(_families())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample per queue and state."""
        if self._looks:
            self.look()
        tasks, oldest = _families()
        if time.monotonic() - self._looked_at < _FRESH_S:
            for name, state in self._states.items():
                for kind, count in zip(_STATES, state.tasks, strict=True):
                    tasks.add_metric([name, kind], count)
                oldest.add_metric([name], state.oldest_s)
        yield from (tasks, oldest)

    def look(self) -> None:
        """Ask Redis; where it is away nothing is known. Blocks for about two seconds at most."""
        # Whoever comes meanwhile sees what the one before has seen.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._open()
            self._states = {name: _state(queue) for name, queue in self._queues.items()}
            self._looked_at = time.monotonic()
        except (RopewayError, *TROUBLE):  # its absence is what there is to see
            self._looked_at = -_FRESH_S
        finally:
            self._lock.release()

    def waiting(self) -> dict[str, tuple[int, float]]:
        """By queue (`tasks`, `webhooks`) how many wait, and for how many seconds the first has; nothing where the last
        look saw nothing.
        """
        if time.monotonic() - self._looked_at >= _FRESH_S:
            return {}
        return {name: (state.tasks[0], state.oldest_s) for name, state in self._states.items()}

    def close(self) -> None:
        """Close the connection."""
        for queue in self._queues.values():
            queue.connection.close()

    def _open(self) -> None:
        """When it is first asked: RQ takes its time to import."""
        if self._queues:
            return
        from rq import Queue
        from rq.serializers import JSONSerializer

        client = connect_sync(
            self._url,
            max_connections=1,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_ANSWER_S,
            socket_connect_timeout=_ANSWER_S,
        )
        if not isinstance(client, redis.Redis):
            raise TypeError("background tasks cannot be kept in a cluster")
        self._queues = {
            name: Queue(queue, connection=client, serializer=JSONSerializer) for name, queue in _QUEUES.items()
        }


def _state(queue: Queue) -> _State:
    from rq.job import Job

    with queue.connection.pipeline(transaction=False) as pipeline:
        pipeline.llen(queue.key)
        for registry in (queue.scheduled_job_registry, queue.started_job_registry, queue.failed_job_registry):
            pipeline.zcard(registry.key)
        pipeline.lindex(queue.key, 0)
        *counts, first = pipeline.execute()
    since: Any = None
    if first is not None:
        since = queue.connection.hget(Job.key_for(first.decode(errors="replace")), "enqueued_at")
    return _State(tuple(counts), _age(since))


def _age(since: Any) -> float:
    """Seconds since a moment as RQ writes it; 0 where it is none."""
    from rq.utils import str_to_date

    if isinstance(since, bytes):
        with contextlib.suppress(ValueError):  # of somebody else
            moment = str_to_date(since)
            return 0.0 if moment is None else max(0.0, time.time() - moment.timestamp())
    return 0.0


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    return (
        GaugeMetricFamily(
            f"{NAMESPACE}_task_queue_tasks",
            "Background tasks by state; scheduled ones are tried again later",
            labels=["queue", "state"],
        ),
        GaugeMetricFamily(
            f"{NAMESPACE}_task_queue_oldest_seconds",
            "For how long the first of the background tasks that wait has waited",
            labels=["queue"],
        ),
    )
