"""The task of a process of its own, run as RQ would run it in a fork."""

from __future__ import annotations

import importlib
import sys
from typing import Final

import msgspec
import redis
import structlog
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.job import Job
from rq.logutils import setup_loghandlers
from rq.serializers import JSONSerializer

from shared.connect import connect_sync
from shared.errors import RopewayError
from shared.logs import configure as configure_logs
from shared.redis_errors import TROUBLE
from shared.settings import TasksSettings
from shared.task_queue import QUEUE, RUN_BATCH, tasks_url
from tasks.horse import Order
from tasks.jobs import configure
from tasks.rq_worker import TaskJob, TaskQueueOfWorker, TaskWorker

_log = structlog.stdlib.get_logger("tasks.horse_task")

#: Modules by the tasks that need them and that others do without. Imported before the task counts as begun: until then
#: it waits in the queue's eyes, and nobody misses it.
_NEEDED: Final = {RUN_BATCH: "tasks.batch_run"}


def run(line: bytes) -> None:
    """Run the task of an order; ends the process."""
    order = msgspec.json.decode(line, type=Order)
    settings = TasksSettings(**order.settings)
    configure_logs(settings.log_level, settings.log_json)
    for name in ("rq.worker", "rq.job"):
        setup_loghandlers(order.log_level, name=name)
    configure(settings)
    try:
        worker, job, queue = _prepare(order, settings)
    except (NoSuchJobError, RopewayError, *TROUBLE) as error:
        _log.warning("task cannot be run", task=order.job, why=repr(error))
        sys.exit(1)
    worker.main_work_horse(job, queue)


def _prepare(order: Order, settings: TasksSettings) -> tuple[TaskWorker, Job, TaskQueueOfWorker]:
    connection = connect_sync(tasks_url(settings), max_connections=4)
    if not isinstance(connection, redis.Redis):
        raise TypeError("background tasks cannot be kept in a cluster")
    queue = TaskQueueOfWorker(QUEUE, connection=connection, serializer=JSONSerializer)
    worker = TaskWorker(
        [queue],
        order.worker,
        connection=connection,
        serializer=JSONSerializer,
        job_class=TaskJob,
        log_job_description=False,
        prepare_for_work=False,
    )
    job = TaskJob.fetch(order.job, connection=connection, serializer=JSONSerializer)
    execution = Execution.fetch(order.execution, job.id, connection)
    execution._job = job
    worker.execution = execution
    if (module := _NEEDED.get(job.func_name or "")) is not None:
        importlib.import_module(module)
    return worker, job, queue
