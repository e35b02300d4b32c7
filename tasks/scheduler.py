"""RQ's scheduler, run by the keeper: tasks that are to be tried again go back into the queue when it is time."""

from __future__ import annotations

import math

import redis
import structlog
from rq.scheduler import RQScheduler
from rq.scripts import acquire_or_refresh_lock
from rq.serializers import JSONSerializer

from shared.redis_errors import TROUBLE
from shared.task_queue import QUEUE
from tasks.rq_worker import drop_foreign

_log = structlog.stdlib.get_logger("tasks.scheduler")


class TaskScheduler(RQScheduler):
    """Of any number of these, one has the lock.

    Args:
        lock_s: seconds after which another one takes the place of one that is gone. RQ's own lock lasts a minute.
    """

    def __init__(self, connection: redis.Redis, lock_s: float, logging_level: str) -> None:
        super().__init__([QUEUE], connection=connection, serializer=JSONSerializer, logging_level=logging_level)
        self._lock_s = math.ceil(lock_s)

    def acquire_locks(self, auto_start: bool = False) -> set[str]:
        """Take or keep the lock; the queues that this scheduler serves now."""
        outcome = acquire_or_refresh_lock(self.connection, self.get_locking_key(QUEUE), self.name, self._lock_s)
        self._acquired_locks = set() if outcome == "taken" else {QUEUE}
        self._scheduled_job_registries = []
        return self._acquired_locks

    def queue_due(self) -> None:
        """Queue what is due, where this one has the lock. Raises errors of Redis."""
        self.acquire_locks()
        try:
            self.enqueue_scheduled_jobs()  # type: ignore[no-untyped-call]
        except TROUBLE:
            raise
        except Exception:  # noqa: BLE001 - bytes of anybody may fail in any way, and must not hold up all else
            _log.exception("scheduled tasks do not read")
            drop_foreign(self.connection)
