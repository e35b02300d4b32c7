"""The queue of background tasks, in RQ's form with JSON for its contents: who puts tasks there, and where it is."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import redis

from shared.adapter_record import PendingLoad
from shared.connect import connect_sync
from shared.errors import InvalidRequestError
from shared.redis_errors import TROUBLE, typed
from shared.redis_url import parse
from shared.settings import AdapterSettings

if TYPE_CHECKING:
    from rq import Queue

#: RQ's name of the queue.
QUEUE: Final = "ropeway"
#: The tasks that there are, by the names under which RQ knows them. Nothing else is ever run.
LOAD_ADAPTER: Final = "tasks.jobs.load_adapter"
RUN_BATCH: Final = "tasks.jobs.run_batch"
DELIVER_WEBHOOKS: Final = "tasks.jobs.deliver_webhooks"
#: RQ's name of the queue of webhooks: they do not wait for adapters that are loaded, nor for batches.
WEBHOOK_QUEUE: Final = "ropeway-webhooks"
#: Seconds until each further try of a task that failed for what may pass.
RETRY_AFTER_S: Final = (2, 10, 30, 60)
#: Seconds that a task to deliver webhooks may wait, and is kept where it failed: the next look at them makes another.
_DELIVER_TTL_S: Final = 60
#: Seconds that a task counts as about to be begun after the last that was heard of who begins it.
STARTING_S: Final = 30
#: Seconds that a task may wait to be begun, and that one that failed is kept for people.
_TTL_S: Final = 24 * 3600


def tasks_url(settings: AdapterSettings) -> str:
    """Where the queue is.

    Raises:
        InvalidRequestError: in a cluster, which RQ cannot use.
    """
    name = "redis_url" if settings.tasks_redis_url is None else "tasks_redis_url"
    url = settings.tasks_redis_url or settings.redis_url
    if parse(url).kind == "cluster":
        raise InvalidRequestError(
            f"{name}: background tasks cannot be kept in a cluster; ROPEWAY_TASKS_REDIS_URL must name a single server, "
            "or one behind sentinels",
            param="tasks_redis_url",
        )
    return url


def task_id(name: str, pending: PendingLoad) -> str:
    """The id of the task of a load. Versions begin anew with each first load of a name: so the time is in it."""
    digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    return f"adapter-{digest}-{pending.version}-{pending.starts}-{pending.since_ms}"


def batch_task_id(batch: str, number: int) -> str:
    """The id of a batch's task; `number`: how many were queued for it before."""
    return f"{batch}-{number}"


def starting_key(job_id: str) -> str:
    """What stands, for `STARTING_S`, for a task whose process is being started; renewed by whoever does it."""
    return f"rq:starting:{job_id}"


class TaskQueue:
    """Puts tasks into the queue. All calls block: make them in a thread. They raise ServiceUnavailableError.

    Args:
        url: see `tasks_url`.
        timeout_s: seconds that one try of a task may take.
        name: RQ's name of the queue.
    """

    def __init__(self, url: str, timeout_s: int, name: str = QUEUE) -> None:
        self._url, self._timeout_s, self._name = url, timeout_s, name
        self._opened: Queue | None = None

    def load_adapter(self, name: str, pending: PendingLoad) -> None:
        """Have a load begun that the name's record tells of. A task that is there already is not put there again."""
        self._put(LOAD_ADAPTER, (name, pending.version), task_id(name, pending), "load an adapter")

    def run_batch(self, batch: str, number: int) -> None:
        """Have a batch gone on with. A task of the same number that is there already is not put there again."""
        self._put(RUN_BATCH, (batch, number), batch_task_id(batch, number), "run a batch")

    def deliver_webhooks(self) -> None:
        """Have webhooks sent that are due, unless a task that will do it waits already. For a queue of their own."""
        if self.others_wait():
            return
        try:
            self._queue().enqueue_call(
                DELIVER_WEBHOOKS,
                args=("due", 0),
                description="deliver webhooks",
                timeout=-1,
                ttl=_DELIVER_TTL_S,
                failure_ttl=_DELIVER_TTL_S,
                result_ttl=0,
            )
        except TROUBLE as error:
            raise typed(error) from error

    def _put(self, function: str, arguments: tuple[str, int], job_id: str, description: str) -> None:
        from rq import Retry
        from rq.exceptions import DuplicateJobError

        try:
            self._queue().enqueue_call(
                function,
                args=arguments,
                job_id=job_id,
                description=description,
                retry=Retry(max=len(RETRY_AFTER_S), interval=list(RETRY_AFTER_S)),
                timeout=self._timeout_s,
                ttl=_TTL_S,
                failure_ttl=_TTL_S,
                result_ttl=0,
                unique=True,
            )
        except DuplicateJobError:
            return
        except TROUBLE as error:
            raise typed(error) from error

    def waits(self, name: str, pending: PendingLoad) -> bool:
        """Whether a load's task is still to be begun, or to be tried again later."""
        return self._waits(task_id(name, pending))

    def batch_waits(self, batch: str, number: int) -> bool:
        """Whether a batch's task is still to be begun, or to be tried again later."""
        return self._waits(batch_task_id(batch, number))

    def others_wait(self) -> bool:
        """Whether any task is still to be begun."""
        try:
            return bool(self._queue().count)
        except TROUBLE as error:
            raise typed(error) from error

    def _waits(self, job_id: str) -> bool:
        """What a task says of itself may be half of the truth: what it waits in is looked at, too."""
        from rq.intermediate_queue import IntermediateQueue
        from rq.job import Job, JobStatus

        queue = self._queue()
        try:
            with queue.connection.pipeline() as pipeline:
                pipeline.hget(Job.key_for(job_id), "status")
                pipeline.lpos(queue.key, job_id)
                pipeline.lpos(IntermediateQueue.get_intermediate_queue_key(queue.key), job_id)
                pipeline.zscore(queue.scheduled_job_registry.key, job_id)
                pipeline.exists(starting_key(job_id))
                status, queued, taken, due, starting = pipeline.execute()
        except TROUBLE as error:
            raise typed(error) from error
        if status == JobStatus.QUEUED.value.encode():
            return queued is not None or taken is not None or bool(starting)
        return status == JobStatus.SCHEDULED.value.encode() and due is not None

    def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            self._opened.connection.close()

    def _queue(self) -> Queue:
        """Opened when it is first needed: most gateways never do, and RQ takes its time to import."""
        if self._opened is None:
            from rq import Queue
            from rq.serializers import JSONSerializer

            client = connect_sync(self._url, max_connections=4)
            if not isinstance(client, redis.Redis):
                raise TypeError("background tasks cannot be kept in a cluster")
            self._opened = Queue(self._name, connection=client, serializer=JSONSerializer)
        return self._opened
