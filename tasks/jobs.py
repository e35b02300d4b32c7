"""The functions that RQ calls, each in a process of its own. Their arguments are JSON, and they answer nothing."""

from __future__ import annotations

import asyncio
from typing import Final

from rq import get_current_job

from shared.adapter_store import open_store
from shared.adapters import Adapters
from shared.connect import connect
from shared.settings import TasksSettings
from shared.task_queue import LOAD_ADAPTER
from tasks.load import load

#: Names that may be run.
ALLOWED: Final = frozenset({LOAD_ADAPTER})

_settings: TasksSettings | None = None


def configure(settings: TasksSettings) -> None:
    """Say with which settings tasks run; before the first one does."""
    global _settings
    _settings = settings


def load_adapter(name: str, version: int) -> None:
    """Load the version of an adapter that the name's record tells of.

    Raises:
        TryAgainError: RQ tries again later.
    """
    job = get_current_job()
    last = job is None or not job.retries_left
    asyncio.run(_load(name, version, _settings or TasksSettings(), last=last))


async def _load(name: str, version: int, settings: TasksSettings, *, last: bool) -> None:
    client = connect(settings.redis_url, max_connections=4)
    try:
        store = open_store(settings.adapter_store)
        await load(name, version, adapters=Adapters(client), store=store, settings=settings, last=last)
    finally:
        await client.aclose()
