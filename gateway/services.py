"""What routes work with: made once by the application, found through the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from gateway.adapter_desk import AdapterDesk
from gateway.admin import Admins
from gateway.admission import Caller
from gateway.batch_desk import BatchDesk
from gateway.callbacks import Callbacks
from gateway.catalogue import Catalogue, Pool
from gateway.entrance import Entrance, Repeat
from gateway.hub import Hub
from gateway.idempotency import digest_of, key_of
from gateway.keyring import ANONYMOUS, Keyring
from gateway.load import PoolLoads
from gateway.metrics import GatewayMetrics
from gateway.policies import Policies
from gateway.pool_state import PoolStates
from gateway.preparation import Preparer
from gateway.schemas import parse
from gateway.served import Directory
from gateway.stream_tokens import StreamTokens
from gateway.submission import Submitter
from shared.adapter_store import AdapterStore, open_store
from shared.job_index import JobIndex
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import JobClass
from shared.settings import GatewaySettings
from shared.task_metrics import TaskQueueCollector
from shared.tracing import Tracing
from shared.usage import UsageStore

#: Bodies larger than this are parsed in a thread.
_INLINE_BYTES = 64 * 1024

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that lives as long as the application."""

    settings: GatewaySettings
    store: JobStore
    catalogue: Catalogue
    preparer: Preparer
    entrance: Entrance
    hub: Hub
    pools: PoolStates
    submitter: Submitter
    metrics: GatewayMetrics
    executor: Executor
    directory: Directory
    adapters: AdapterDesk
    admins: Admins
    keyring: Keyring
    policies: Policies
    usage: UsageStore
    loads: PoolLoads
    index: JobIndex
    batches: BatchDesk
    tokens: StreamTokens
    callbacks: Callbacks
    tracing: Tracing
    task_queues: TaskQueueCollector | None

    async def pool_of(self, model: str, tenant: str) -> Pool:
        """The pool behind a model's name. Raises PermissionDeniedError, ModelNotFoundError, ServiceUnavailableError."""
        (await self.policies.of(tenant)).check_model(model)
        return (await self.directory.find(model)).pool

    def wait_s(self, job_id: str, job_class: JobClass, *, delay_s: float = 0.0, own_tokens: int = 0) -> float | None:
        """About how many seconds until a job starts; None where nothing is known of that, or no worker lives."""
        name = JobId.parse(job_id).pool
        pool = self.catalogue.known(name)
        if pool is None or not pool.workers:
            return None
        waits = self.loads.of(name).wait_s(job_class, own_tokens)
        return None if waits is None else max(delay_s, waits)

    def adapter_store(self) -> AdapterStore:
        """Where uploads go; opened anew, which costs little and may block."""
        return open_store(self.settings.adapter_store)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """What a call answers that would hold up every other stream for long."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)


def services_of(request: Request) -> Services:
    """Those of the application that serves this request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


def caller_of(request: Request) -> Caller:
    """Who sent this request, as the middleware found out."""
    state = request.scope.get("state", {})
    return Caller(
        tenant=state.get("tenant", ANONYMOUS),
        authenticated=state.get("authenticated", False),
        key=state.get("key_id", ""),
        request_id=state.get("request_id"),
        trace=state.get("trace"),
    )


def repeat_of(request: Request, body: BaseModel) -> Repeat | None:
    """The request's idempotency key with what is asked under it; None without one.

    Raises:
        InvalidRequestError: the key is malformed.
    """
    key = key_of(request)
    return None if key is None else Repeat(key, digest_of(request.url.path, body))


async def body_of(request: Request, model: type[M]) -> M:
    """The body, parsed; a large one off the event loop.

    Raises:
        InvalidRequestError, PayloadTooLargeError: see `gateway.schemas.parse` and `gateway.middleware.BodyLimit`.
    """
    data = await request.body()
    if len(data) <= _INLINE_BYTES:
        return parse(model, data)
    return await services_of(request).in_thread(lambda: parse(model, data))
