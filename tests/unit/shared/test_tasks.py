"""Ending background tasks."""

from __future__ import annotations

import asyncio

from shared.tasks import cancel_all


async def test_a_lost_cancel_is_repeated() -> None:
    running = asyncio.Event()

    async def stubborn() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await running.wait()
    await asyncio.wait_for(cancel_all([task], patience_s=0.01), 30)
    assert task.cancelled()


async def test_a_task_that_fails_or_has_ended_is_no_hindrance() -> None:
    async def fails() -> None:
        raise RuntimeError

    tasks = [asyncio.create_task(fails()), asyncio.create_task(asyncio.sleep(0))]
    await asyncio.sleep(0.01)
    await cancel_all(tasks)
    await cancel_all([])
    assert all(task.done() for task in tasks)
