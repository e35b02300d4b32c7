"""The process that runs background tasks: RQ's worker, the keeper in a thread, probes and metrics on a port."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from types import FrameType
from typing import Any, Final

import redis
import structlog
from rq.serializers import JSONSerializer

from shared.adapter_store import open_store
from shared.adapters import Adapters
from shared.batches import Batches
from shared.connect import connect, connect_sync
from shared.errors import RopewayError
from shared.file_store import FileStore
from shared.logs import configure as configure_logs
from shared.probes import HealthServer
from shared.redis_errors import TROUBLE
from shared.redis_url import mask
from shared.settings import TasksSettings
from shared.task_metrics import TaskQueueCollector
from shared.task_queue import QUEUE, WEBHOOK_QUEUE, TaskQueue, tasks_url
from shared.tracing import open_tracing
from shared.webhooks import Webhooks
from tasks.batch_keeper import BatchKeeper
from tasks.jobs import configure
from tasks.keeper import Keeper, lock_s
from tasks.metrics import TasksMetrics
from tasks.rq_worker import TaskQueueOfWorker, TaskWorker
from tasks.scheduler import TaskScheduler
from tasks.webhook_keeper import WebhookKeeper
from tasks.webhook_worker import Postman

_log = structlog.stdlib.get_logger("tasks.main")

#: Exit code for settings that cannot be served: a restart would not help.
EXIT_REFUSED: Final = os.EX_CONFIG
#: Seconds that RQ waits for a task before it looks whether it is to stop; its sign of life lasts longer.
_WORKER_TTL_S: Final = 60
_MONITOR_S: Final = 10
_PAUSE_S: Final = 1.0
#: Seconds that the keeper may take for a round.
_ROUND_S: Final = 120.0


class Tasks:
    """A tasks process. Nothing runs before `run`."""

    def __init__(self, settings: TasksSettings) -> None:
        self._settings, self._url = settings, tasks_url(settings)
        self._store = open_store(settings.adapter_store)
        self._files = FileStore(settings.files_store)
        self._tracing = open_tracing(settings, "ropeway-tasks", uuid.uuid4().hex)
        self._metrics = TasksMetrics()
        self._metrics.registry.register(TaskQueueCollector(self._url, looks=True))
        self._stop = threading.Event()
        self._keeper: Keeper | None = None
        self._worker: TaskWorker | None = None
        self._postman = Postman(self._connection, _WORKER_TTL_S, self._log_level)

    def run(self) -> int:
        """Serve until told to stop; answers the exit code."""
        configure(self._settings, self._tracing)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        settings = self._settings
        health = HealthServer(
            settings.tasks_health_host,
            settings.tasks_health_port,
            self._metrics.registry,
            live=self._live,
            ready=self._ready,
        )
        _log.info("tasks start", health_port=health.port, redis=mask(self._url))
        keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        keeper.start()
        self._postman.start()
        try:
            while not self._stop.is_set():
                self._work()
        finally:
            self._postman.stop(TaskWorker.grace_s)
            self._tracing.close()
            health.close()
        _log.info("tasks end")
        return 0

    def _work(self) -> None:
        """Run tasks until told to stop, or until Redis fails for longer than RQ bears."""
        try:
            connection = self._connection()
            queue = TaskQueueOfWorker(QUEUE, connection=connection, serializer=JSONSerializer)
            worker = self._worker = TaskWorker(
                [queue],
                connection=connection,
                serializer=JSONSerializer,
                job_class=queue.job_class,
                worker_ttl=_WORKER_TTL_S,
                job_monitoring_interval=_MONITOR_S,
                maintenance_interval=_WORKER_TTL_S,
                log_job_description=False,
            )
            worker.settings, worker.log_level = self._settings, self._log_level
            worker.on_hung = self._metrics.hung.inc
            worker.work(logging_level=self._log_level)
            if worker._shutdown_requested_date is not None:
                self._stop.set()
        except (RopewayError, *TROUBLE) as error:
            _log.warning("Redis failed, trying again", error=repr(error))
            self._stop.wait(_PAUSE_S)
        finally:
            self._worker = None
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._signalled)

    def _connection(self) -> redis.Redis:
        # Longer than RQ waits for a task: an empty queue is no failure.
        client = connect_sync(self._url, max_connections=4, socket_timeout=_WORKER_TTL_S + 10)
        if not isinstance(client, redis.Redis):
            raise TypeError("background tasks cannot be kept in a cluster")
        return client

    @property
    def _log_level(self) -> str:
        """RQ's: it says every step of every task."""
        return "DEBUG" if self._settings.log_level == "debug" else "WARNING"

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Told to stop while no task was waited for."""
        self._stop.set()

    def _keep(self) -> None:
        try:
            asyncio.run(self._kept())
        except Exception:  # noqa: BLE001 - said here; then this process is no longer alive for its probe
            _log.exception("the keeper ended")

    async def _kept(self) -> None:
        settings = self._settings
        client = connect(settings.redis_url, max_connections=4)
        sender = TaskQueue(self._url, settings.adapter_load_timeout_s)
        webhook_queue = TaskQueue(self._url, settings.adapter_load_timeout_s, WEBHOOK_QUEUE)
        try:
            keeper = self._keeper = Keeper(
                Adapters(client),
                self._store,
                sender,
                TaskScheduler(self._connection(), lock_s(settings.adapter_sweep_s), self._log_level),
                self._metrics,
                BatchKeeper(Batches(client), self._files, sender, settings.files_retention_s),
                every_s=settings.adapter_sweep_s,
                retention_s=settings.adapter_retention_s,
            )
            webhooks = WebhookKeeper(Webhooks(client), webhook_queue, self._metrics, settings.webhook_poll_s)
            await asyncio.gather(keeper.run(), webhooks.run())
        finally:
            sender.close()
            webhook_queue.close()
            await client.aclose()

    # Probes, called in the health server's threads

    def _live(self) -> tuple[bool, dict[str, Any]]:
        keeper = self._keeper
        silent = 0.0 if keeper is None else time.monotonic() - keeper.looked_at
        well = silent < _ROUND_S + self._settings.adapter_sweep_s
        return well, {"status": "ok" if well else "stalled", "silent_s": round(silent, 3)}

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        keeper, worker = self._keeper, self._worker
        since = None if keeper is None or not keeper.seen_redis else time.monotonic() - keeper.seen_redis
        fresh = since is not None and since < max(15.0, 4 * self._settings.adapter_sweep_s)
        ready = fresh and worker is not None and not self._stop.is_set()
        return ready, {"status": "ready" if ready else "unready", "redis_seen_s": since}


def run(settings: TasksSettings | None = None) -> int:
    """Run background tasks in this process until it is told to stop; answers the exit code."""
    settings = settings or TasksSettings()
    configure_logs(settings.log_level, settings.log_json)
    if settings.otlp_traces_endpoint is not None:
        # Tasks are processes of their own, and read a gateway's settings.
        os.environ["ROPEWAY_OTLP_TRACES_ENDPOINT"] = settings.otlp_traces_endpoint
    try:
        tasks = Tasks(settings)
    except RopewayError as error:
        _log.error("tasks cannot run with these settings", reason=error.message)
        return EXIT_REFUSED
    return tasks.run()
