"""What jobs used is counted once, in the step that ends them, whoever ends them and however often it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import InvalidRequestError
from shared.jobs import Ending, Lease, Lifetime, Publish, PulledJob
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import Card, Result, TokenizerBundle, Usage, encode
from shared.upkeep import Upkeep
from shared.usage import MAX_DAYS, UsageRow, UsageStore, days_of, parse_day
from tests.support.jobs import KEEP, NOW, POOL, budget, envelope, frame, last, tokens

LANES = 3


@pytest.fixture
async def usage(commands: AsyncClient) -> UsageStore:
    store = UsageStore(commands)
    card = Card(pool=POOL, digest="d", lanes=LANES, max_model_len=64, vocab_size=9, eos_token_ids=[], kv_tokens=640)
    await store.put_card(card, TokenizerBundle(tokenizer_json="{}"))
    return store


async def rows(usage: UsageStore, tenant: str | None = None) -> Sequence[UsageRow]:
    today = await usage.today()
    return await usage.usage([today - timedelta(days=1), today], tenant)  # midnight may just have passed


def counted(found: Sequence[UsageRow]) -> list[tuple[Any, ...]]:
    """Without the day."""
    return [astuple(row)[1:] for row in found]


def ending(job: PulledJob, owner: str, used: Usage, *, told: bool = True, seq: int = 1) -> Publish:
    result = encode(Result(id=job.envelope.id, status="completed", usage=used))
    frames = [frame(job.epoch, seq, kind="done", status="completed")]
    return Publish(
        job.envelope.id, owner, job.epoch, seq, frames, Ending("completed", result, used if told else None)
    )  # fmt: skip


async def take(store: JobStore, lane: int = 0, owner: str = "w", lease: Lease = KEEP) -> list[PulledJob]:
    return (await store.pull(POOL, lane, owner, budget(), lease)).jobs


@pytest.mark.topologies
async def test_sums_over_lanes_by_tenant_key_and_model(store: JobStore, usage: UsageStore) -> None:
    for lane in range(LANES):
        await store.submit(envelope(lane=lane, tenant="a", key="k1"))
        await store.submit(envelope(lane=lane, tenant="a", key="k2", adapter="sql|odd"))
        await store.submit(envelope(lane=lane, tenant="b"))
        for job in await take(store, lane):
            await store.publish([ending(job, "w", Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=lane))])
    mine = [("a", "k1", POOL, 3, 30, 12, 3), ("a", "k2", "sql|odd", 3, 30, 12, 3)]
    assert counted(await rows(usage, "a")) == mine
    assert counted(await rows(usage)) == [*mine, ("b", "", POOL, 3, 30, 12, 3)]
    assert await usage.usage([await usage.today() - timedelta(days=2)]) == []


@pytest.mark.parametrize("told", [True, False])
async def test_the_end_said_twice_counts_once(store: JobStore, usage: UsageStore, told: bool) -> None:
    await store.submit(envelope(key="k"))
    (job,) = await take(store)
    end = ending(job, "w", Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=5), told=told)
    for _ in range(3):
        await store.publish([end])
    assert counted(await rows(usage)) == [("default", "k", POOL, 1, 3, 2, 5)]
    await store.delete(job.envelope.id)
    assert len(await rows(usage)) == 1, "the job has gone, what it used has not"


async def test_a_zombie_and_its_heir_count_once(store: JobStore, usage: UsageStore) -> None:
    await store.submit(envelope(key="k"))
    (job,) = await take(store, owner="first")
    (again,) = await take(store, owner="second", lease=NOW)
    used = Usage(prompt_tokens=3, completion_tokens=5)
    await store.publish([ending(again, "second", used)])
    await store.publish([ending(job, "first", Usage(prompt_tokens=3, completion_tokens=105))])
    assert counted(await rows(usage)) == [("default", "k", POOL, 1, 3, 0, 5)]


async def test_who_ends_a_job_without_a_worker_counts_what_was_published(
    store: JobStore, commands: AsyncClient, usage: UsageStore
) -> None:
    waiting, begun, late = (envelope(key=key) for key in ("waits", "runs", "late"))
    await store.submit(waiting)
    await store.cancel(waiting.id)
    await store.cancel(waiting.id)
    await store.submit(begun)
    (job,) = await take(store)
    await store.publish([tokens(job, "w", 1, 2)])
    await store.cancel(begun.id)
    await take(store, owner="other", lease=NOW)  # the first one has died: it ends here
    await store.submit(late, lifetime=Lifetime(deadline_s=0.001))
    await Upkeep(commands).sweep_lane(POOL, 0, 0.0)
    assert counted(await rows(usage)) == [
        ("default", "late", POOL, 1, 0, 0, 0),
        ("default", "runs", POOL, 1, 4, 0, 2),
        ("default", "waits", POOL, 1, 0, 0, 0),
    ]


async def test_usage_goes_after_its_days(commands: AsyncClient, usage: UsageStore, client: Any) -> None:
    store = JobStore(commands, usage_days=2)
    await store.submit(envelope(key="k"))
    (job,) = await take(store)
    await store.publish([ending(job, "w", Usage())])
    today = await usage.today()
    number = (today - parse_day("1970-01-01", "")).days
    for key in (keys.usage(POOL, 0, number, "default"), keys.usage_tenants(POOL, 0, number)):
        assert await client.pexpiretime(key) == (number + 3) * 86_400_000
    longer = JobStore(commands, usage_days=9)
    await longer.submit(envelope(key="k"))
    (job,) = await take(store)
    await store.publish([ending(job, "w", Usage())])
    assert await client.pexpiretime(keys.usage(POOL, 0, number, "default")) == (number + 10) * 86_400_000


async def test_what_somebody_wrote_there_keeps_no_job_from_ending(
    store: JobStore, usage: UsageStore, client: Any
) -> None:
    today = (await usage.today() - parse_day("1970-01-01", "")).days
    await client.set(keys.usage_tenants(POOL, 0, today), b"foreign", ex=60)
    await client.hset(keys.usage(POOL, 0, today, "default"), mapping={"k|pool|prompt": b"much", "odd": 1, "|": b"\xff"})
    await client.expire(keys.usage(POOL, 0, today, "default"), 60)
    odd = envelope(key="k")
    await store.submit(odd)
    await client.hset(keys.job(JobId.parse(odd.id)), "usage_days", b"1e300")
    (job,) = await take(store)
    await store.publish([last(job, "w", 1)])
    assert (await store.status(odd.id))[0] == "completed"
    assert counted(await rows(usage, "default")) == [("default", "k", POOL, 1, 0, 0, 0)]
    assert await rows(usage) == []


async def test_a_job_of_a_submitter_that_names_no_account_is_not_counted(
    store: JobStore, usage: UsageStore, client: Any
) -> None:
    job = envelope(key="k")
    await store.submit(job)
    await client.hdel(keys.job(JobId.parse(job.id)), "account")
    (pulled,) = await take(store)
    await store.publish([last(pulled, "w", 1)])
    assert await rows(usage) == []


def test_days() -> None:
    first = parse_day("2026-02-27", "start")
    assert [day.isoformat() for day in days_of(first, parse_day("2026-03-01", "end"))][1:] == [
        "2026-02-28",
        "2026-03-01",
    ]
    assert len(days_of(first, first + timedelta(days=MAX_DAYS - 1))) == MAX_DAYS
    for last_day in (first - timedelta(days=1), first + timedelta(days=MAX_DAYS)):
        with pytest.raises(InvalidRequestError, match="end"):
            days_of(first, last_day)
    for text in ("2026-02-30", "yesterday", "", "20260227", "2026-02-27T00:00"):
        with pytest.raises(InvalidRequestError, match="start"):
            parse_day(text, "start")
