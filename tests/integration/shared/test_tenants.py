"""Rate limits and idempotency keys on a real server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import ForeignDataError
from shared.jobs import QueuedCount, QueuedLimits, RateLimits
from shared.keys import JobId
from shared.tenants import IdempotentRequest, Tenants
from tests.support.jobs import KEEP, budget, envelope, last


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
    await client.set(name, b"\xc1", keepttl=True)
    with pytest.raises(ForeignDataError):
        await tenants.claim("t", "key", request(), 60)


def ids(count: int, lanes: int = 4) -> list[str]:
    return [str(JobId.new("pool", number % lanes)) for number in range(count)]


@pytest.mark.topologies
async def test_only_what_still_waits_counts_after_a_look(tenants: Tenants, client: Any) -> None:
    limits = QueuedLimits(jobs=6)
    waits, runs, ended, cancelled, foreign = (envelope(lane=lane) for lane in range(5))
    jobs = {e.id: e.cost_tokens for e in (waits, runs, ended, cancelled, foreign)}
    (never,) = ids(1)
    assert await tenants.enter("t", limits, {**jobs, never: 10}, 60) == QueuedCount(True, 6, 60)
    for job in (waits, runs, ended, cancelled):
        await tenants.submit(job)
    await tenants.pull("pool", 1, "w", budget(), KEEP)
    (taken,) = (await tenants.pull("pool", 2, "w", budget(), KEEP)).jobs
    await tenants.publish([last(taken, "w", 1)])
    await tenants.cancel(cancelled.id)
    await client.set(keys.job(JobId.parse(foreign.id)), b"something else", ex=60)
    assert await tenants.enter("t", limits, {ids(1)[0]: 10}, 60) == QueuedCount(False, 6, 60)

    assert await tenants.settle("t") == 4
    # The one that has no job may be on its way; it counts for a while.
    assert await tenants.enter("t", limits, {}, 60) == QueuedCount(True, 2, 20)
    held = await client.hget(keys.queued("t"), never)
    await client.hset(keys.queued("t"), never, held.split()[0] + b" 1000")  # entered long ago
    assert await tenants.settle("t") == 1
    assert await tenants.enter("t", limits, {}, 60) == QueuedCount(True, 1, 10)


async def test_all_jobs_of_a_request_are_counted_or_none_and_once(tenants: Tenants, client: Any) -> None:
    limits = QueuedLimits(jobs=3, tokens=100)
    first = dict.fromkeys(ids(2), 30)
    assert await tenants.enter("t", limits, first, 60) == QueuedCount(True, 2, 60)
    assert await tenants.enter("t", limits, first, 60) == QueuedCount(True, 2, 60), "a repeat of the call"
    assert await tenants.enter("t", limits, dict.fromkeys(ids(2), 1), 60) == QueuedCount(False, 2, 60)
    assert await tenants.enter("t", limits, dict.fromkeys(ids(1), 41), 60) == QueuedCount(False, 2, 60)
    assert await tenants.enter("other", limits, dict.fromkeys(ids(3), 33), 60) == QueuedCount(True, 3, 99)
    assert await tenants.enter("t", limits, dict.fromkeys(ids(1), 40), 60) == QueuedCount(True, 3, 100)
    await tenants.leave("t", [*first])
    assert await tenants.enter("t", limits, {}, 60) == QueuedCount(True, 1, 40)


async def test_nothing_of_a_count_stays_for_ever(tenants: Tenants, client: Any) -> None:
    jobs = dict.fromkeys(ids(3), 5)
    await tenants.enter("t", QueuedLimits(jobs=9), jobs, 60)
    assert 0 < await client.pttl(keys.queued("t")) <= 60_000
    await tenants.leave("t", [*jobs, "unknown"])
    assert not await client.exists(keys.queued("t"))


async def test_a_count_of_many_gateways_at_once_is_within_its_limit(tenants: Tenants) -> None:
    answers = await asyncio.gather(*(tenants.enter("t", QueuedLimits(jobs=50), {i: 1}, 60) for i in ids(200)))
    assert sum(answer.allowed for answer in answers) == 50


async def test_a_count_that_somebody_wrote_into_is_right_after_a_look(tenants: Tenants, client: Any) -> None:
    job = envelope()
    await tenants.submit(job)
    await tenants.enter("t", QueuedLimits(jobs=2), {job.id: job.cost_tokens}, 60)
    await client.hset(keys.queued("t"), mapping={b"\xff\xfe": b"7 x", "tokens": b"nonsense", ids(1)[0]: b"much"})
    await tenants.settle("t")
    assert await tenants.enter("t", QueuedLimits(jobs=2), {}, 60) == QueuedCount(True, 1, job.cost_tokens)
