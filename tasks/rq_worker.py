"""RQ's worker, restricted: it runs the tasks of this project and nothing else, and what it reads is JSON.

Whoever can write to Redis could else have it import and call any function, or send requests to any address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import structlog
from redis import Redis
from rq import Queue, Worker
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.job import Job
from rq.registry import ScheduledJobRegistry
from rq.serializers import JSONSerializer

from shared.redis_errors import TROUBLE
from shared.settings import TasksSettings
from shared.task_queue import QUEUE, STARTING_S, starting_key
from tasks.horse import Horse, Order, settings_of
from tasks.jobs import ALLOWED, stopping
from tasks.load import TryAgainError

_log = structlog.stdlib.get_logger("tasks.rq_worker")

#: Fields of a job that make RQ import something, call somebody, or go on with another job.
_DANGEROUS = (
    "success_callback_name", "failure_callback_name", "stopped_callback_name", "webhooks", "dependency_ids",
    "dependency_id", "repeats_left", "group_id", "rate_limit_key",
)  # fmt: skip


class ForeignTaskError(NoSuchJobError):
    """A task that somebody else wrote. RQ passes over it as over one that is gone."""


class TaskJob(Job):
    """A job that can only be a call of an allowed function with plain arguments."""

    allowed: ClassVar[frozenset[str]] = ALLOWED

    def restore(self, raw_data: Any) -> Any:
        """Read a job.

        Raises:
            ForeignTaskError: it is none of ours.
        """
        names = {name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in raw_data}
        if found := [name for name in _DANGEROUS if name in names and raw_data.get(name.encode())]:
            raise self._foreign(f"it has {found[0]}")
        try:
            super().restore(raw_data)
            function, instance, arguments, options = self.serializer.loads(self.data)
        except NoSuchJobError:
            raise
        except Exception as error:  # noqa: BLE001 - bytes of anybody may fail in any way
            raise self._foreign(f"it does not read: {type(error).__name__}") from None
        if function not in self.allowed or instance is not None:
            raise self._foreign("it calls another function")
        name, version, *rest = [*arguments, None, None] if len(arguments) != 2 else arguments
        if rest or options or not isinstance(name, str) or type(version) is not int:
            raise self._foreign("it has other arguments")

    def _foreign(self, why: str) -> ForeignTaskError:
        _log.error("task of somebody else passed over", task=self.id, why=why)
        return ForeignTaskError("this task is none of ours")


def drop_foreign(connection: Redis) -> None:
    """Take out of the tasks that wait for their time what is none of ours or does not read."""
    key = ScheduledJobRegistry(QUEUE, connection=connection).key  # type: ignore[no-untyped-call]
    members: Any = connection.zrange(key, 0, -1)
    for member in members:
        try:
            TaskJob.fetch(member.decode(), connection=connection, serializer=JSONSerializer)
        except TROUBLE:
            raise
        except Exception as error:  # noqa: BLE001 - bytes of anybody may fail in any way
            _log.error("scheduled task of somebody else dropped", error=type(error).__name__)
            connection.zrem(key, member)


class TaskWorker(Worker):
    """Runs each task in a process of its own. Takes commands from signals only, not from a channel of Redis."""

    #: Seconds that SIGTERM leaves a task to end.
    grace_s: float = 20.0
    #: Seconds without a sign of life after which the process of a task is killed; another one begins it anew.
    silent_s: float = 60.0

    #: What tasks run with, and RQ's level of logs; set before it works.
    settings: TasksSettings
    log_level: str
    #: Called when a process was killed because it gave no sign of life.
    on_hung: Callable[[], None]
    _horse: Horse | None = None
    _silent_looks: int = 0

    def subscribe(self) -> None:
        """Nothing: RQ would listen to commands here, in a thread."""

    def unsubscribe(self) -> None:
        """Nothing either."""

    def handle_warm_shutdown_request(self) -> None:
        """A task that does not end in time is killed; it is tried again, here or elsewhere."""
        stopping.set()
        timer = threading.Timer(self.grace_s, self._hurry)
        timer.daemon = True
        timer.start()

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """Start the process of a task; not by a fork, see `tasks.horse`."""
        if self.execution is None:
            raise RuntimeError("a task is begun before its execution is entered")
        # Its place in RQ's intermediate queue would outlive this process by minutes, and nobody would miss the task.
        with self.connection.pipeline() as pipeline:
            pipeline.set(starting_key(job.id), "", ex=STARTING_S)
            pipeline.lrem(queue.intermediate_queue_key, 0, job.id)
            pipeline.execute()
        order = Order(settings_of(self.settings), self.name, job.id, self.execution.id, self.log_level)
        self._horse, self._silent_looks = Horse(order), 0
        self._horse_pid = self._horse.pid

    def monitor_work_horse(self, job: Job, queue: Queue, execution: Execution) -> None:
        """Wait for its end."""
        try:
            super().monitor_work_horse(job, queue, execution)
        finally:
            if self._horse is not None:
                self._horse.close()

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        """Every `job_monitoring_interval` seconds: see whether the process lives, and say so to RQ.

        Looks are counted and not seconds: where the whole machine stood still, the process stood still with it.
        """
        if self._horse is not None:
            self._silent_looks = 0 if self._horse.gave_sign() else self._silent_looks + 1
            if self._silent_looks * self.job_monitoring_interval >= self.silent_s:
                _log.error("the process of a task gives no sign of life and is killed", task=job.id, pid=self.horse_pid)
                self._silent_looks = 0
                self.on_hung()
                self.kill_horse()
        self.connection.expire(starting_key(job.id), STARTING_S)
        super().maintain_heartbeats(job, execution)

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Log what nobody foresaw; that a load is tried again has been said by itself."""
        if not isinstance(exc_info[1], TryAgainError):
            super().handle_exception(job, *exc_info)

    def _hurry(self) -> None:
        if self.horse_pid:
            self.kill_horse()


class TaskQueueOfWorker(Queue):
    """A queue whose jobs are `TaskJob`s."""

    job_class = TaskJob
