"""RQ's worker for webhooks, in a thread of the tasks process: what it does is mostly to wait for others, so it needs no
process of its own. Nothing that takes long stands before it in its queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, Final

import redis
import structlog
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty

from shared.errors import RopewayError
from shared.redis_errors import TROUBLE
from shared.task_queue import WEBHOOK_QUEUE
from tasks.jobs import ALLOWED_OF_WEBHOOKS, stopping
from tasks.rq_worker import TaskJob, TaskQueueOfWorker

_log = structlog.stdlib.get_logger("tasks.webhook_worker")

_PAUSE_S: Final = 1.0


class WebhookJob(TaskJob):
    """A job that can only be one to deliver webhooks."""

    allowed: ClassVar[frozenset[str]] = ALLOWED_OF_WEBHOOKS


class WebhookQueue(TaskQueueOfWorker):
    """A queue of those."""

    job_class = WebhookJob


class _NoDeathPenalty(BaseDeathPenalty):
    """None: RQ's needs signals, which are the main thread's. A task here ends by itself."""

    def setup_death_penalty(self) -> None:
        """Nothing."""

    def cancel_death_penalty(self) -> None:
        """Nothing."""


class WebhookWorker(SimpleWorker):
    """Runs tasks in the thread that called `work`, without signals and without commands from a channel of Redis."""

    death_penalty_class = _NoDeathPenalty
    job_class = WebhookJob
    queue_class = WebhookQueue

    #: Set while it is at no task.
    idle: threading.Event

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Run one."""
        self.idle.clear()
        try:
            super().execute_job(job, queue)
        finally:
            self.idle.set()

    def subscribe(self) -> None:
        """Nothing: RQ would listen to commands here, in a thread."""

    def unsubscribe(self) -> None:
        """Nothing either."""

    def _install_signal_handlers(self) -> None:
        """None: they are the main thread's."""


class Postman:
    """The thread.

    Args:
        open_connection: gives RQ a connection of its own.
        worker_ttl_s: seconds that RQ's sign of life lasts.
        log_level: RQ's.
    """

    def __init__(self, open_connection: Callable[[], redis.Redis], worker_ttl_s: int, log_level: str) -> None:
        self._open, self._worker_ttl_s, self._log_level = open_connection, worker_ttl_s, log_level
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._idle = threading.Event()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Begin nothing more, and wait for what is being sent, up to so many seconds."""
        stopping.set()
        self._idle.wait(patience_s)

    def _run(self) -> None:
        while not stopping.is_set():
            self._idle.set()
            try:
                self._work()
            except (RopewayError, *TROUBLE) as error:
                _log.warning("Redis failed, trying again", error=repr(error))
            except Exception:  # noqa: BLE001 - without this thread no webhook would be sent
                _log.exception("the worker of webhooks failed, trying again")
            stopping.wait(_PAUSE_S)
        self._idle.set()

    def _work(self) -> None:
        connection = self._open()
        try:
            worker = WebhookWorker(
                [WebhookQueue(WEBHOOK_QUEUE, connection=connection, serializer=JSONSerializer)],
                connection=connection,
                serializer=JSONSerializer,
                worker_ttl=self._worker_ttl_s,
                maintenance_interval=self._worker_ttl_s,
                log_job_description=False,
            )
            worker.idle = self._idle
            worker.work(logging_level=self._log_level)
        finally:
            connection.close()
