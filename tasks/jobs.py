"""The functions that RQ calls, each in a process of its own but for that of webhooks. Their arguments are JSON, and
they answer nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog
from msgspec.structs import replace
from rq import get_current_job

from shared.adapter_store import open_store
from shared.adapters import Adapters
from shared.batches import Batches
from shared.connect import connect
from shared.errors import NotFoundError, RopewayError
from shared.file_store import FileStore
from shared.settings import GatewaySettings, TasksSettings
from shared.task_queue import DELIVER_WEBHOOKS, LOAD_ADAPTER, RUN_BATCH, TaskQueue, tasks_url
from shared.tracing import OFF, Tracing
from tasks.horse_main import living
from tasks.load import TryAgainError, load

_log = structlog.stdlib.get_logger("tasks.jobs")

#: Names that may be run.
ALLOWED: Final = frozenset({LOAD_ADAPTER, RUN_BATCH})
#: The same of the queue of webhooks.
ALLOWED_OF_WEBHOOKS: Final = frozenset({DELIVER_WEBHOOKS})
#: Set where this process is to end: what can be left to others is left.
stopping: Final = threading.Event()
#: Names that are looked up at a time.
_LOOKUPS: Final = 64

_settings: TasksSettings | None = None
_tracing: Tracing = OFF


def configure(settings: TasksSettings, tracing: Tracing = OFF) -> None:
    """Say with which settings tasks run, and where those in this very process tell of it; before the first one does."""
    global _settings, _tracing
    _settings, _tracing = settings, tracing


def load_adapter(name: str, version: int) -> None:
    """Load the version of an adapter that the name's record tells of.

    Raises:
        TryAgainError: RQ tries again later.
    """
    job = get_current_job()
    last = job is None or not job.retries_left
    asyncio.run(_alive(_load(name, version, _settings or TasksSettings(), last=last)))


async def _load(name: str, version: int, settings: TasksSettings, *, last: bool) -> None:
    client = connect(settings.redis_url, max_connections=4)
    try:
        store = open_store(settings.adapter_store)
        await load(name, version, adapters=Adapters(client), store=store, settings=settings, last=last)
    finally:
        await client.aclose()


def run_batch(batch: str, number: int) -> None:
    """Go on with a batch for a while; where there is more to do, another task is queued behind those that wait.

    Raises:
        TryAgainError: RQ tries again later.
    """
    asyncio.run(_alive(_run_batch(batch, _settings or TasksSettings())))


async def _alive(task: Coroutine[Any, Any, None]) -> None:
    """Do it, and have its process give signs of life from the same event loop."""
    async with living():
        await task


async def _run_batch(batch: str, settings: TasksSettings) -> None:
    # Other tasks do not need it, nor the gateway's code that it brings.
    from tasks.batch_run import BatchRun

    client = connect(settings.redis_url, max_connections=16)
    queue = TaskQueue(tasks_url(settings), settings.adapter_load_timeout_s)
    batches, token = Batches(client), secrets.token_hex(16)
    try:
        if not await batches.begin(batch, token):
            return
        run = BatchRun(
            batches,
            FileStore(settings.files_store),
            batch,
            token,
            redis_url=settings.redis_url,
            window=settings.batch_window,
            slice_s=settings.batch_slice_s,
            retention_s=settings.files_retention_s,
            max_line_bytes=GatewaySettings(redis_url=settings.redis_url).max_body_bytes,
            others_wait=queue.others_wait,
        )
        if await run.run():
            record = await batches.change(batch, lambda held: replace(held, slices=held.slices + 1))
            await asyncio.to_thread(queue.run_batch, batch, record.slices)
    except NotFoundError:
        _log.warning("batch is gone", batch=batch)
    except RopewayError as error:
        _log.warning("batch cannot go on now", batch=batch, why=error.message)
        raise TryAgainError(error.message) from error
    finally:
        queue.close()
        await client.aclose()


def deliver_webhooks(what: str, number: int) -> None:
    """Send webhooks that are due, for a while; its arguments say nothing."""
    asyncio.run(_deliver_webhooks(_settings or TasksSettings()))


async def _deliver_webhooks(settings: TasksSettings) -> None:
    # Imported by the thread that runs this again and again; other tasks need none of it.
    from shared.address_guard import AddressGuard
    from shared.job_index import JobIndex
    from shared.webhook_secrets import WebhookSecrets
    from shared.webhooks import Webhooks
    from tasks.webhook_message import Messages
    from tasks.webhook_run import WebhookRun
    from tasks.webhook_send import Sender

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="lookup"))
    client = connect(settings.redis_url, max_connections=16)
    try:
        run = WebhookRun(
            Webhooks(client),
            Messages(JobIndex(client), settings.webhook_max_bytes),
            WebhookSecrets(client),
            Sender(AddressGuard(settings.webhook_allow, http=settings.webhook_http), settings.webhook_timeout_s),
            settings,
            stopping.is_set,
            _tracing,
        )
        await run.run()
    except RopewayError as error:
        # They are due still, and the next look at them makes another task.
        _log.warning("webhooks cannot be sent now", why=error.message)
    finally:
        await client.aclose()
