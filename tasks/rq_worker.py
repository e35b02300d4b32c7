"""RQ's worker, restricted: it runs the tasks of this project and nothing else, and what it reads is JSON.

Whoever can write to Redis could else have it import and call any function, or send requests to any address.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import Any, ClassVar

import structlog
from redis import Redis
from rq import Queue, Worker
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.registry import ScheduledJobRegistry
from rq.serializers import JSONSerializer

from shared.redis_errors import TROUBLE
from shared.task_queue import QUEUE
from tasks.jobs import ALLOWED, stopping
from tasks.load import TryAgainError

_log = structlog.stdlib.get_logger("tasks.rq_worker")

_PR_SET_PDEATHSIG = 1
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

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        """The process of one task: it ends with this one."""
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        super().main_work_horse(job, queue)

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
