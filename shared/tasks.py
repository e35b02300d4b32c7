"""Ending background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import structlog

_log = structlog.stdlib.get_logger("shared.tasks")


async def cancel_all(tasks: Collection[asyncio.Task[Any]], patience_s: float = 1.0) -> None:
    """Cancel tasks and wait for their ends.

    One cancel can get lost, in a library whose time-out fires at the same moment; so it is repeated.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=patience_s)
        if pending:
            _log.warning("tasks outlived a cancel", tasks=sorted(task.get_name() for task in pending))
    await asyncio.gather(*tasks, return_exceptions=True)
