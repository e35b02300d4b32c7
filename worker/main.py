"""A worker process: assembly, signals, drain."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from engine.request import EngineProtocol, ModelInfo
from shared import keys
from shared.adapters import Adapters
from shared.connect import connect, connect_pubsub, connect_sync
from shared.errors import ConflictError, InvalidRequestError, RopewayError
from shared.jobstore import JobStore, SyncJobStore
from shared.logs import configure
from shared.probes import HealthServer
from shared.redis_url import mask, parse
from shared.settings import WorkerSettings
from shared.tasks import cancel_all
from shared.tracing import OFF, open_tracing
from worker.adapters import AdapterWatch
from worker.clock import RedisClock
from worker.control import PING_S, ControlListener
from worker.engines import build_engine
from worker.holdings import Admission, Holdings
from worker.intake import Intake, IntakeConfig
from worker.job import Cause, Handover
from worker.job_traces import JobTraces
from worker.lease import LeaseKeeper
from worker.loop import EngineLoop
from worker.metrics import WorkerMetrics
from worker.publisher import REDIS_TROUBLE, Publisher
from worker.pulse import EXIT_BROKEN, EXIT_REFUSED, Fatal, exit_now
from worker.reclaim import ReclaimRule
from worker.registry import Registry

_log = structlog.stdlib.get_logger("worker")

#: A thread that wants to run gets the interpreter after at most this many seconds. With Python's 5 ms the publisher
#: and the event loop would wait for the engine's thread longer than a short step takes.
_SWITCH_INTERVAL = 0.0005
#: Seconds that a drain gives Redis to accept the last frames and take back what is handed over.
_HANDOVER_S = 5.0
#: Adapters whose jobs a worker takes, for each of its slots: one that is in it, and the next, which is read meanwhile.
_ADAPTERS_PER_SLOT = 2

Build = Callable[[WorkerSettings], EngineProtocol]


class Worker:
    """One worker. `run` once.

    Args:
        settings: of the process.
        build: makes the engine; called in the engine's thread.
        fatal: ends the process from any thread.
        owner: as whom it takes jobs, never used before; None: one is drawn.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        build: Build = build_engine,
        fatal: Fatal = exit_now,
        owner: str | None = None,
    ) -> None:
        self._settings, self._fatal = settings, fatal
        self.owner = owner or uuid.uuid4().hex
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._state = "starting"
        self._exit_code = 0
        self._clock = RedisClock()
        self._holdings = Holdings()
        self._metrics = WorkerMetrics(settings.pool or ("sim" if settings.engine == "sim" else settings.model))
        self._loop = EngineLoop(lambda: build(settings), self._holdings, self._metrics, self._clock, fatal)
        self._tracing = OFF
        self._lease: LeaseKeeper | None = None
        self._registry: Registry | None = None

    async def run(self) -> int:
        """Serve until told to stop; answers the exit code."""
        running = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, self.stop)
        settings = self._settings
        try:
            self._tracing = open_tracing(settings, "ropeway-worker", self.owner)
        except InvalidRequestError as error:
            _log.error("this worker cannot run with these settings", reason=error.message)
            return EXIT_REFUSED
        health = HealthServer(
            settings.health_host, settings.health_port, self._metrics.registry, live=self._live, ready=self._ready
        )
        _log.info("worker starts", owner=self.owner, health_port=health.port, redis=mask(settings.redis_url))
        self._loop.start()
        try:
            info = await self._engine_built()
            if info is not None:
                await self._serve(info)
        except Exception:  # noqa: BLE001 - whatever it was, the process cannot serve: say why and let it be restarted
            _log.exception("worker failed")
            self._exit_code = EXIT_BROKEN
        finally:
            await asyncio.to_thread(self._tracing.close)
            health.close()
        _log.info("worker ends", owner=self.owner, code=self._exit_code)
        return self._exit_code

    def stop(self) -> None:
        """Drain; a second call hands back at once what still runs."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _engine_built(self) -> ModelInfo | None:
        """The model; None if the worker is stopped meanwhile, or if the settings ask for what cannot be had."""
        try:
            info: ModelInfo | None = await self._unless_stopped(asyncio.wrap_future(self._loop.built))
        except (RopewayError, ValueError, OSError) as error:
            _log.error("no engine can be made of these settings", reason=str(error))
            self._exit_code = EXIT_REFUSED
            return None
        return info

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> Any:
        """The result of `work`, or None if the worker is told to stop before it is there."""
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if work.done():
            return work.result()
        work.cancel()
        return None

    async def _serve(self, info: ModelInfo) -> None:
        """From a built engine to the end of the drain."""
        settings = self._settings
        pool = settings.pool or info.name
        if keys.POOL_PATTERN.match(pool) is None:
            raise InvalidRequestError(f"pool: {pool!r} is no name for a pool; set one with --pool", param="pool")
        url = settings.redis_url
        rule = ReclaimRule(settings.lease_s, settings.max_attempts)
        home_poll_s = settings.home_poll_ms / 1e3
        # In a cluster messages pass between nodes, and no answer of one of them says that all of those have come.
        one_node = parse(url).kind != "cluster"
        # Pulls have connections of their own that never hide a failure: what may be reclaimed depends on it.
        puller = connect(
            url,
            connected=rule.connected,
            max_connections=1,
            retry=AsyncRetry(NoBackoff(), 0),
            socket_timeout=min(5.0, settings.lease_s),
        )
        reader, subscriber = connect(url), connect_pubsub(url)
        # The publisher tries again by itself, and the frames of others must not wait for a node that is away.
        sender = connect_sync(url, max_connections=2, retry=Retry(NoBackoff(), 1))
        # A renewal that takes longer than till the next one is better made anew.
        renewer = connect_sync(url, max_connections=2, retry=Retry(NoBackoff(), 0), socket_timeout=settings.lease_s / 3)
        try:
            store = JobStore(reader)
            admission, traces = Admission(info.kv_tokens), JobTraces(self._tracing, self.owner, pool)
            intake = Intake(
                JobStore(puller),
                store,
                self._intake_config(pool, info),
                rule,
                self._loop,
                self._holdings,
                admission,
                self._metrics,
                traces,
            )
            self._holdings.on_empty = intake.room
            publisher = Publisher(
                SyncJobStore(sender),
                self.owner,
                self._holdings,
                self._metrics,
                self._fatal,
                on_end=self._loop.end,
                room=self._loop.nudge,
                traces=traces,
            )
            lease = self._lease = LeaseKeeper(
                SyncJobStore(renewer),
                self.owner,
                self._holdings,
                self._metrics,
                self._fatal,
                on_end=self._loop.end,
                engine=self._loop.pulse,
                publisher=publisher.pulse,
                lease_s=settings.lease_s,
                step_timeout_s=settings.step_timeout_s,
            )
            registry = self._registry = Registry(
                store,
                info,
                self._loop,
                self._metrics,
                self._clock,
                pool=pool,
                lanes=settings.lanes,
                owner=self.owner,
                max_num_seqs=settings.max_num_seqs,
                heartbeat_s=settings.heartbeat_s,
                on_owners=intake.owners,
                on_pause=intake.pause,
                on_conflict=self._refused,
            )
            adapters = AdapterWatch(Adapters(reader), pool, settings.lanes, self._loop, settings.heartbeat_s)
            listener = ControlListener(
                subscriber,
                pool,
                self._metrics,
                on_wake=intake.wake,
                on_cancel=intake.cancel,
                on_pause=intake.pause,
                on_subscribed=intake.poll_all,
                on_adapters=adapters.look,
                ping_s=min(PING_S, home_poll_s) if one_node else PING_S,
            )
            if one_node:
                intake.hears_all = lambda: time.monotonic() - listener.heard_at < 2 * home_poll_s
            if await self._join(registry):
                self._loop.attach(publisher, admission, intake.room)
                publisher.start()
                lease.start()
                works = {"intake": intake.run(), "registry": registry.run(), "control": listener.run()}
                if info.max_lora_rank:
                    works["adapters"] = adapters.run()
                await self._until_drained(works, intake, registry, publisher, lease)
                await self._leave(store, registry, pool)
        finally:
            sender.close()
            renewer.close()
            for client in (puller, reader, subscriber):
                await client.aclose()

    def _intake_config(self, pool: str, info: ModelInfo) -> IntakeConfig:
        settings = self._settings
        return IntakeConfig(
            pool=pool,
            lanes=settings.lanes,
            owner=self.owner,
            home_poll_s=settings.home_poll_ms / 1e3,
            # A look at all lanes is also what finds jobs whose lease has run out.
            all_poll_s=min(settings.all_poll_ms / 1e3, settings.lease_s / 2),
            steal_delay_s=settings.steal_delay_ms / 1e3,
            max_adapters=_ADAPTERS_PER_SLOT * settings.max_loras if info.max_lora_rank else None,
        )

    async def _join(self, registry: Registry) -> bool:
        try:
            joining = asyncio.ensure_future(registry.join())
            await self._unless_stopped(joining)
        except ConflictError as error:
            self._refused(error)
            return False
        return not self._stop.is_set()

    def _refused(self, error: ConflictError) -> None:
        _log.error("this worker does not fit into the pool", reason=error.message)
        self._exit_code = EXIT_REFUSED
        self._stop.set()

    async def _until_drained(
        self,
        works: Mapping[str, Coroutine[Any, Any, None]],
        intake: Intake,
        registry: Registry,
        publisher: Publisher,
        lease: LeaseKeeper,
    ) -> None:
        tasks = {asyncio.create_task(work, name=name) for name, work in works.items()}
        pulling = next(task for task in tasks if task.get_name() == "intake")
        for task in tasks:
            task.add_done_callback(self._task_done)
        self._state = "ready"
        _log.info("worker is ready", owner=self.owner)
        await self._stop.wait()
        self._state = "draining"
        registry.state("draining")
        _log.info("worker drains", jobs=len(self._holdings), grace_s=self._settings.grace_s)
        await intake.stop()
        await pulling
        await self._drain()
        # Off the event loop, which still beats and listens.
        sent = await asyncio.to_thread(self._close_threads, publisher)
        lease.close(1.0)
        if not sent:
            _log.warning("Redis did not take everything back; the rest moves when its lease runs out")
        await cancel_all(tasks)

    async def _drain(self) -> None:
        """Let jobs end within the grace period, then hand back what is left."""
        emptied, running = asyncio.Event(), asyncio.get_running_loop()

        def on_empty() -> None:
            running.call_soon_threadsafe(emptied.set)

        self._holdings.on_empty = on_empty
        if len(self._holdings) > 0:
            waits = [asyncio.create_task(event.wait()) for event in (emptied, self._hurry)]
            await asyncio.wait(waits, timeout=self._settings.grace_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        for job in self._holdings.all():
            self._loop.end(job, Cause.RELEASED)

    def _close_threads(self, publisher: Publisher) -> bool:
        """Answers whether Redis has taken everything back."""
        self._loop.close(_HANDOVER_S)
        # Those of a step that takes longer than that: what it makes is not published any more.
        publisher.put([Handover(job) for job in self._holdings.all()])
        return publisher.close(_HANDOVER_S)

    async def _leave(self, store: JobStore, registry: Registry, pool: str) -> None:
        try:
            await registry.leave()
            pending = await store.forget(pool, self.owner, self._settings.lanes)
        except REDIS_TROUBLE as error:
            _log.warning("could not leave the registry, its entry runs out", error=repr(error))
            return
        if pending:
            _log.warning("jobs are left behind, they move when their lease runs out", streams=pending)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """None of the tasks ends by itself; one that fails takes the process down, in good order."""
        if not task.cancelled() and task.exception() is not None:
            _log.error("task failed", task=task.get_name(), exc_info=task.exception())
            self._exit_code = EXIT_BROKEN
            self._stop.set()

    # Probes, called in the health server's threads

    def _live(self) -> tuple[bool, dict[str, Any]]:
        lease, timeout = self._lease, self._settings.step_timeout_s
        stalled = 0.0 if lease is None else lease.stalled_s
        if lease is not None and lease.is_alive():
            stalled = max(stalled, time.monotonic() - lease.looked_at - timeout)
        body = {"status": "ok" if stalled <= timeout else "stalled", "state": self._state, "jobs": len(self._holdings)}
        return stalled <= timeout, body

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        registry = self._registry
        since = None if registry is None or not registry.seen_redis else time.monotonic() - registry.seen_redis
        fresh = since is not None and since < max(5.0, 4 * self._settings.heartbeat_s)
        ready = self._state == "ready" and fresh
        return ready, {"status": "ready" if ready else self._state, "redis_seen_s": since}


def run(settings: WorkerSettings | None = None, build: Build = build_engine, owner: str | None = None) -> int:
    """Run a worker in this process until it is told to stop; answers the exit code. See `Worker` for its arguments."""
    settings = settings or WorkerSettings()
    configure(settings.log_level, settings.log_json)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    return asyncio.run(_run(settings, build, owner))


async def _run(settings: WorkerSettings, build: Build, owner: str | None) -> int:
    return await Worker(settings, build, owner=owner).run()
