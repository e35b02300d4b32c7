"""The catalogue goes on whatever it finds."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway import catalogue
from gateway.catalogue import Catalogue
from shared.errors import ServiceUnavailableError


class Store:
    """Fails to list its pools, each time in another way, and then has none."""

    def __init__(self) -> None:
        self.errors: list[Exception] = [ServiceUnavailableError("away"), RuntimeError("unforeseen"), ValueError("odd")]
        self.listed = asyncio.Event()

    async def pools(self) -> list[str]:
        if self.errors:
            raise self.errors.pop()
        self.listed.set()
        return []


async def test_no_error_ends_the_refreshing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "REFRESH_S", 0.0)
    store = Store()
    task = asyncio.create_task(Catalogue(cast(Any, store), cast(Any, None)).run())
    listed = asyncio.create_task(store.listed.wait())
    await asyncio.wait({task, listed}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    assert store.listed.is_set() and not task.done()
    for left in (task, listed):
        left.cancel()
    await asyncio.gather(task, listed, return_exceptions=True)
