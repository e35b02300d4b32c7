"""Rate limits and idempotency keys on a real server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import ForeignDataError
from shared.jobs import RateLimits
from shared.tenants import IdempotentRequest, Tenants


@pytest.fixture
def tenants(commands: AsyncClient) -> Tenants:
    return Tenants(commands)


def request(digest: str = "d", job_id: str = "a") -> IdempotentRequest:
    return IdempotentRequest(digest=digest, job_ids=[job_id], created=1)


async def test_a_minute_has_so_many_requests_and_no_more(tenants: Tenants) -> None:
    limits = RateLimits(requests=5)
    spent = [await tenants.spend("t", limits, 1, 10**9) for _ in range(7)]
    assert [s.allowed for s in spent] == [True] * 5 + [False] * 2
    assert [s.requests_left for s in spent] == [4, 3, 2, 1, 0, 0, 0]
    assert all(s.tokens_left is None for s in spent)
    wait = spent[-1].wait_s
    assert wait is not None
    assert 5 < wait <= 12, "one in twelve seconds"
    assert (await tenants.spend("other", limits, 1, 0)).allowed


async def test_both_are_taken_or_neither(tenants: Tenants) -> None:
    limits = RateLimits(requests=10, tokens=100)
    assert (await tenants.spend("t", limits, 1, 60)).allowed
    refused = await tenants.spend("t", limits, 1, 60)
    assert (refused.allowed, refused.requests_left, refused.tokens_left) == (False, 9, 40)
    assert refused.wait_s is not None
    assert 10 < refused.wait_s <= 12.1, "twenty of a hundred are missing"
    assert (await tenants.spend("t", limits, 1, 40)).allowed


async def test_buckets_fill_steadily_and_not_over_their_rim(tenants: Tenants, client: Any) -> None:
    limits = RateLimits(requests=60_000, tokens=600)
    await tenants.spend("t", limits, 60_000, 600)
    await asyncio.sleep(0.3)
    spent = await tenants.spend("t", limits, 100, 2)
    assert spent.allowed, "a thousand requests and ten tokens a second come back"
    await client.hset(keys.rate("t"), "at", 1)  # long ago
    spent = await tenants.spend("t", limits, 0, 0)
    assert (spent.requests_left, spent.tokens_left) == (60_000, 600)
    assert 0 < await client.pttl(keys.rate("t")) <= 120_000


async def test_what_is_more_than_the_limit_never_is_allowed(tenants: Tenants) -> None:
    spent = await tenants.spend("t", RateLimits(requests=5, tokens=100), 1, 101)
    assert (spent.allowed, spent.wait_s, spent.requests_left) == (False, None, 5)


async def test_a_flood_from_many_gateways_is_counted_exactly(tenants: Tenants) -> None:
    limits = RateLimits(requests=50)
    began = time.monotonic()
    spent = await asyncio.gather(*(tenants.spend("t", limits, 1, 0) for _ in range(200)))
    back = (time.monotonic() - began) * 50 / 60
    assert 50 <= sum(s.allowed for s in spent) <= 51 + back, "some come back in the meantime"


async def test_the_first_holds_a_key(tenants: Tenants, client: Any) -> None:
    first = request()
    assert await tenants.claim("t", "key", first, 60) == first
    assert await tenants.claim("t", "key", request("other", "b"), 60) == first
    assert await tenants.claim("t", "key2", request("other", "b"), 60) == request("other", "b")
    assert await tenants.claim("u", "key", request("other", "b"), 60) == request("other", "b")
    assert all([0 < await client.pttl(key) <= 60_000 for key in await client.keys("rw:*:idem:*")])


async def test_of_many_at_once_one_holds_it(tenants: Tenants) -> None:
    held = await asyncio.gather(*(tenants.claim("t", "key", request("d", str(i)), 60) for i in range(50)))
    assert len({each.job_ids[0] for each in held}) == 1


async def test_a_key_of_any_text_is_one_short_key(tenants: Tenants, client: Any) -> None:
    await tenants.claim("t", "{x}:job:" + "k" * 200, request(), 60)
    (name,) = await client.keys("*")
    assert name.startswith(b"rw:{t}:idem:")
    assert len(name) < 60


async def test_a_record_that_does_not_read_is_said(tenants: Tenants, client: Any) -> None:
    await tenants.claim("t", "key", request(), 60)
    (name,) = await client.keys("*")
    await client.set(name, b"\xc1")
    with pytest.raises(ForeignDataError):
        await tenants.claim("t", "key", request(), 60)
