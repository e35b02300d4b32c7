"""What lives as long as a gateway's process: connections, tasks in the background, and what routes use of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import structlog

from gateway.access import Gate
from gateway.adapter_desk import AdapterDesk
from gateway.admin import Admins
from gateway.batch_desk import BatchDesk
from gateway.callbacks import Callbacks
from gateway.catalogue import Catalogue
from gateway.entrance import Entrance
from gateway.hub import Hub
from gateway.idempotency import Idempotency
from gateway.limits import Limiter, PoolLimits
from gateway.load import PoolLoads
from gateway.metrics import GatewayMetrics
from gateway.policies import Policies
from gateway.pool_metrics import PoolCollector
from gateway.pool_state import PoolStates
from gateway.preparation import Preparer
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
from shared.tracing import Tracing
from shared.upkeep import Upkeep
from shared.usage import UsageStore
from shared.webhooks import Webhooks

log = structlog.get_logger(__name__)

#: Longest pause between two looks of a silent stream at the clock.
IDLE_S = 5.0


async def open_services(
    settings: GatewaySettings, metrics: GatewayMetrics, tracing: Tracing, stack: AsyncExitStack
) -> Services:
    """Open everything; `stack` closes it in the opposite order."""
    client = connect(settings.redis_url)
    stack.push_async_callback(client.aclose)
    executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    store = _store(client, settings)
    hub = await _hub(store, metrics, settings, stack)
    gate = Gate(Access(client), settings)
    hub.listen(keys.access("ctl"), gate.hear)
    catalogue = Catalogue(store, executor, settings.pools)
    loads = PoolLoads(store, catalogue)
    states = PoolStates(store, catalogue, loads, settings.pools, settings.scale_target_s)
    metrics.registry.register(PoolCollector(states))
    submitter = Submitter(store, metrics, loads, tracing)
    stack.push_async_callback(submitter.close)
    work = {"catalogue": catalogue.run(), "loads": loads.run(), "warn-if-open": gate.warn_if_open()}
    if settings.sweep_s > 0:
        work["sweeper"] = Sweeper(Upkeep(client), metrics, settings.sweep_s).run()
    _run(work, stack)
    log.info("gateway.started", redis=mask(settings.redis_url))
    registry = Adapters(client)
    directory = Directory(catalogue, registry)
    desk = AdapterDesk(registry, catalogue, settings)
    stack.callback(desk.close)
    batch_desk = BatchDesk(Batches(client), settings)
    stack.callback(batch_desk.close)
    secret = settings.token_secret
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


def _store(client: AsyncClient, settings: GatewaySettings) -> JobStore:
    replicas = None
    if settings.submit_replicas:
        replicas = ReplicaWait(settings.submit_replicas, settings.submit_replica_timeout_ms)
    return JobStore(
        client,
        limits=LaneLimits(settings.max_queued_jobs, settings.max_queued_tokens),
        lifetime=Lifetime(settings.deadline_s, settings.max_run_s, settings.retention_s),
        replicas=replicas,
        usage_days=settings.usage_days,
    )


async def _hub(store: JobStore, metrics: GatewayMetrics, settings: GatewaySettings, stack: AsyncExitStack) -> Hub:
    listener = connect_pubsub(settings.redis_url)
    stack.push_async_callback(listener.aclose)
    return await stack.enter_async_context(
        Hub(
            listener,
            store,
            metrics,
            max_streams=settings.max_live_streams,
            queue_frames=settings.stream_queue_frames,
            idle_s=min(IDLE_S, settings.keepalive_s),
        )
    )


def _run(work: dict[str, Coroutine[Any, Any, None]], stack: AsyncExitStack) -> None:
    """Each in the background, until the gateway closes."""
    stack.push_async_callback(cancel_all, [asyncio.create_task(each, name=name) for name, each in work.items()])


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
