"""The application: what lives as long as the process, middleware, routes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

import structlog
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from gateway import cors, docs, errors, scopes
from gateway.access import Gate
from gateway.adapter_desk import AdapterDesk
from gateway.admin import Admins
from gateway.authentication import Authentication
from gateway.batch_desk import BatchDesk
from gateway.callbacks import Callbacks
from gateway.catalogue import Catalogue
from gateway.entrance import Entrance
from gateway.hub import Hub
from gateway.idempotency import Idempotency
from gateway.limits import Limiter, PoolLimits
from gateway.load import PoolLoads
from gateway.metrics import GatewayMetrics
from gateway.middleware import ADAPTERS, FILES, FORM_BYTES, BodyLimit, RequestScope
from gateway.policies import Policies
from gateway.pool_metrics import PoolCollector
from gateway.pool_state import PoolStates
from gateway.preparation import Preparer
from gateway.routes import (
    adapters,
    batches,
    chat,
    completions,
    files,
    health,
    jobs,
    models,
    pools,
    responses,
    tokenize,
    usage,
)
from gateway.schemas import MAX_DEADLINE_S, MAX_DELAY_S
from gateway.served import Directory
from gateway.services import Services
from gateway.stream_tokens import StreamTokens
from gateway.submission import Submitter
from gateway.sweeper import Sweeper
from gateway.tenant_queue import TenantQueues
from shared import keys
from shared.access import Access
from shared.adapters import Adapters
from shared.address_guard import AddressGuard
from shared.batches import Batches
from shared.calls import AsyncClient
from shared.connect import connect, connect_pubsub
from shared.errors import InvalidRequestError
from shared.job_index import JobIndex
from shared.jobs import LaneLimits, Lifetime, ReplicaWait
from shared.jobstore import JobStore
from shared.redis_url import mask
from shared.secret_store import SecretStore
from shared.settings import GatewaySettings
from shared.task_metrics import TaskQueueCollector
from shared.task_queue import tasks_url
from shared.tasks import cancel_all
from shared.tenants import Tenants
from shared.tracing import Tracing, open_tracing
from shared.upkeep import Upkeep
from shared.usage import UsageStore
from shared.webhooks import Webhooks

log = structlog.get_logger(__name__)

#: Longest pause between two looks of a silent stream at the clock.
IDLE_S = 5.0


def create_app(settings: GatewaySettings) -> FastAPI:
    """The gateway as an ASGI application. Redis may be away when it starts; it is then not ready.

    Raises:
        InvalidRequestError: traces are to be sent, and what that needs is not installed.
    """
    metrics = GatewayMetrics()
    tracing = open_tracing(settings, "ropeway-gateway", secrets.token_hex(16))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            # Behind everything else: what ends with the process may still have something to say.
            stack.push_async_callback(asyncio.to_thread, tracing.close)
            app.state.services = await _open(settings, metrics, tracing, stack)
            yield

    app = FastAPI(
        title="Ropeway",
        version=_version(),
        description="Message-queue-driven inference",
        lifespan=lifespan,
        docs_url=None,
        # RequestScope makes spans. The framework's own would look for global providers at each request, and hold
        # queries, tokens of streams among them.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        redoc_url=None,
    )
    for room in (chat, completions, responses, tokenize, models, adapters, files, batches, jobs, pools, usage, health):
        app.include_router(room.router)
        metrics.routes(_routes(room.router.routes))
        scopes.check_complete(_routes(room.router.routes))
    errors.install(app)
    docs.install(app)
    scopes.check_complete(_routes(app.routes))
    # The last one added is the outermost.
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        uploads={ADAPTERS: settings.max_adapter_bytes + FORM_BYTES, FILES: settings.max_file_bytes + FORM_BYTES},
    )
    admins = Admins(settings)
    app.add_middleware(Authentication, required=settings.keys_required, admins=admins)
    app.add_middleware(RequestScope, metrics=metrics, tracing=tracing)
    if settings.cors_origins:
        cors.install(app, settings.cors_origins)
    return app


async def _open(
    settings: GatewaySettings, metrics: GatewayMetrics, tracing: Tracing, stack: AsyncExitStack
) -> Services:
    """Open everything; `stack` closes it in the opposite order."""
    client = connect(settings.redis_url)
    stack.push_async_callback(client.aclose)
    listener = connect_pubsub(settings.redis_url)
    stack.push_async_callback(listener.aclose)
    executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    store = JobStore(
        client,
        limits=LaneLimits(settings.max_queued_jobs, settings.max_queued_tokens),
        lifetime=Lifetime(settings.deadline_s, settings.max_run_s, settings.retention_s),
        replicas=ReplicaWait(settings.submit_replicas, settings.submit_replica_timeout_ms)
        if settings.submit_replicas
        else None,
        usage_days=settings.usage_days,
    )
    hub = await stack.enter_async_context(
        Hub(
            listener,
            store,
            metrics,
            max_streams=settings.max_live_streams,
            queue_frames=settings.stream_queue_frames,
            idle_s=min(IDLE_S, settings.keepalive_s),
        )
    )
    gate = Gate(Access(client), settings)
    hub.listen(keys.access("ctl"), gate.hear)
    catalogue = Catalogue(store, executor, settings.pools)
    loads = PoolLoads(store, catalogue)
    states = PoolStates(store, catalogue, loads, settings.pools, settings.scale_target_s)
    metrics.registry.register(PoolCollector(states))
    submitter = Submitter(store, metrics, loads, tracing)
    stack.push_async_callback(submitter.close)
    background = [
        asyncio.create_task(work, name=name) for name, work in (("catalogue", catalogue.run()), ("loads", loads.run()))
    ]
    if settings.sweep_s > 0:
        sweeper = Sweeper(Upkeep(client), metrics, settings.sweep_s)
        background.append(asyncio.create_task(sweeper.run(), name="sweeper"))
    stack.push_async_callback(cancel_all, background)
    secret = settings.token_secret
    log.info("gateway.started", redis=mask(settings.redis_url))
    background.append(asyncio.create_task(gate.warn_if_open(), name="warn-if-open"))
    registry = Adapters(client)
    directory = Directory(catalogue, registry)
    desk = AdapterDesk(registry, catalogue, settings)
    stack.callback(desk.close)
    batch_desk = BatchDesk(Batches(client), settings)
    stack.callback(batch_desk.close)
    return Services(
        settings=settings,
        store=store,
        catalogue=catalogue,
        preparer=Preparer(directory, executor, settings, gate.policies, tracing),
        entrance=_entrance(client, store, loads, gate.policies, settings),
        hub=hub,
        pools=states,
        submitter=submitter,
        metrics=metrics,
        executor=executor,
        directory=directory,
        adapters=desk,
        admins=Admins(settings),
        keyring=gate.keyring,
        policies=gate.policies,
        usage=UsageStore(client),
        loads=loads,
        index=JobIndex(client),
        batches=batch_desk,
        tokens=StreamTokens(secret.get_secret_value() if secret else None, SecretStore(client)),
        callbacks=Callbacks(AddressGuard(settings.webhook_allow, http=settings.webhook_http), Webhooks(client)),
        tracing=tracing,
        task_queues=_task_queues(settings, metrics, stack),
    )


def _task_queues(
    settings: GatewaySettings, metrics: GatewayMetrics, stack: AsyncExitStack
) -> TaskQueueCollector | None:
    """None where background tasks have no place."""
    try:
        queues = TaskQueueCollector(tasks_url(settings), looks=False)
    except InvalidRequestError:
        return None
    stack.callback(queues.close)
    metrics.registry.register(queues)
    return queues


def _routes(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of each."""
    for route in routes:
        if isinstance(route, Route):
            yield from ((method, route.path) for method in route.methods or ())


def _entrance(
    client: AsyncClient, store: JobStore, loads: PoolLoads, policies: Policies, settings: GatewaySettings
) -> Entrance:
    tenants = Tenants(client)
    longest_s = settings.deadline_s + settings.max_run_s + settings.retention_s
    longest_queued_s = max(settings.deadline_s, MAX_DEADLINE_S) + MAX_DELAY_S
    return Entrance(
        store,
        Idempotency(tenants, longest_s),
        Limiter(
            tenants,
            loads,
            policies,
            PoolLimits(settings.max_pool_queued_jobs, settings.max_pool_queued_tokens),
            TenantQueues(tenants, longest_queued_s),
        ),
    )


def _version() -> str:
    try:
        return version("ropeway")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
