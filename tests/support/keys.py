"""Keys and terms of tenants as operators make them, for tests of gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from shared.access import Access
from shared.api_keys import ApiKey
from shared.connect import connect
from tests.integration.gateway_harness import Gateway, completion

#: Of a test in which nothing but a message can tell of a change.
NEVER: dict[str, Any] = {"require_keys": True, "key_cache_s": 3600.0}


@asynccontextmanager
async def access_to(url: str) -> AsyncIterator[Access]:
    """A store of keys and terms."""
    client = connect(url)
    yield Access(client)
    await client.aclose()


async def make(access: Access, tenant: str = "acme", *scopes: str) -> tuple[str, ApiKey]:
    """A key, of the scope inference where none is named, with its record."""
    return await access.create_key(tenant, scopes or ["inference"])


async def grant(access: Access, tenant: str = "acme", **terms: Any) -> None:
    """Set terms of a tenant."""
    await access.change_terms(tenant, lambda held: msgspec.structs.replace(held, **terms))


def bearer(key: str | None) -> dict[str, str]:
    """The header of a key; none without one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def submit(gateway: Gateway, key: str, **order: Any) -> httpx.Response:
    """Queue a job."""
    order = {"kind": "completion", "body": completion(max_tokens=5), **order}
    return await gateway.http.post("/v1/jobs", json=order, headers=bearer(key))


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(20):
        while not await check():
            await asyncio.sleep(0.01)
