"""What somebody else wrote under our keys costs the job that it was written to, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from shared import keys
from shared.connect import connect_sync
from shared.errors import ForeignDataError
from shared.jobs import Publication, PulledJob
from shared.jobstore import JobStore, SyncJobStore
from shared.keys import JobId
from shared.protocol import Frame, Result, WorkerInfo, decode
from tests.integration.shared.test_scripts_registry import BUNDLE, card
from tests.support.jobs import KEEP, NOW, POOL, budget, envelope, last, owned, tokens

FINE, BROKEN = Publication.FINE, Publication.BROKEN


@pytest.fixture
def sync_store(redis_url: str) -> Iterator[SyncJobStore]:
    client = connect_sync(redis_url)
    yield SyncJobStore(client)
    client.close()


async def two_held(store: JobStore) -> list[PulledJob]:
    for _ in range(2):
        await store.submit(envelope())
    return (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs


async def wrong_type(client: Any, key: str) -> None:
    await client.set(key, "not ours", ex=100)


async def too_far(client: Any, key: str) -> None:
    await client.xadd(key, {"x": "not ours"}, id="999999-0")
    await client.expire(key, 100)


def events(job: PulledJob) -> str:
    return keys.events(JobId.parse(job.envelope.id))


@pytest.mark.parametrize("write", [wrong_type, too_far])
async def test_a_log_that_cannot_be_written_ends_its_job_alone(
    store: JobStore, sync_store: SyncJobStore, client: Any, write: Any
) -> None:
    bad, good = await two_held(store)
    await write(client, events(bad))
    items = [tokens(bad, "w", 1), tokens(good, "w", 1)]
    assert await asyncio.to_thread(sync_store.publish, items) == [BROKEN, FINE]
    assert await store.publish(items) == [BROKEN, FINE]
    assert await asyncio.to_thread(sync_store.bury, "w", owned(bad), ForeignDataError("m")) is True
    view = await store.get(bad.envelope.id)
    assert view.status == "failed" and decode(view.result or b"", Result).error is not None
    frames = [decode(data, Frame) for data in await store.read_log(bad.envelope.id)]
    assert [frame.kind for frame in frames] == ["error"]
    assert [letter.job_id for letter in await store.dead_letters(POOL, 0)] == [bad.envelope.id]
    assert await store.publish([last(good, "w", 2)]) == [FINE]
    assert (await store.pool_load(POOL, 1)).running_jobs == 0


async def test_frames_of_any_shape_do_not_keep_a_job_from_its_end(store: JobStore, client: Any) -> None:
    bad, _ = await two_held(store)
    shapes = [b"\xc1", b"\x01", b"\x81\xa7choices\x01", b"\x81\xa7choices\x91\x81\xa5index\xa1x",
              b"\x81\xa7choices\x91\x81\xa4text\x81\xa1a\x01"]  # fmt: skip
    for number, shape in enumerate(shapes, 1):
        await client.xadd(events(bad), {"f": shape}, id=f"{number}-0")
    await client.hset(keys.job(JobId.parse(bad.envelope.id)), "cancel", "1")
    assert await store.release("w", owned(bad)) is True
    assert (await store.get(bad.envelope.id)).status == "cancelled"


@pytest.mark.parametrize("field", [None, "class", "bucket", "expires_ms"])
async def test_a_broken_hash_is_dropped_and_the_job_behind_it_is_served(
    store: JobStore, client: Any, field: str | None
) -> None:
    bad, good = envelope(), envelope()
    for job in (bad, good):
        await store.submit(job)
    name = keys.job(JobId.parse(bad.id))
    if field is None:
        await wrong_type(client, name)
    else:
        await client.hset(name, field, "not ours")
    assert [job.envelope.id for job in (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs] == [good.id]
    load = await store.pool_load(POOL, 1)
    assert (load.queued_jobs, load.running_jobs) == (0, 1)


@pytest.mark.parametrize("record", [b"\xc1", b"\x01", b"\x90", b""])
async def test_a_broken_record_of_the_last_pull_is_as_none(store: JobStore, client: Any, record: bytes) -> None:
    first, second = envelope(), envelope()
    await store.submit(first)
    await store.pull(POOL, 0, "w", budget(), KEEP)
    await client.set(keys.last_pull(POOL, 0, "w"), record, keepttl=True)
    await store.submit(second)
    assert [job.envelope.id for job in (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs] == [second.id]


async def test_renewing_a_job_whose_hash_is_gone_renews_the_others(store: JobStore, client: Any) -> None:
    bad, good = await two_held(store)
    await wrong_type(client, keys.job(JobId.parse(bad.envelope.id)))
    assert await store.renew("w", [owned(bad), owned(good)]) == [BROKEN, FINE]
    assert [job.envelope.id for job in (await store.pull(POOL, 0, "v", budget(), NOW)).jobs] == [good.envelope.id]


async def test_what_cannot_be_read_has_an_error_of_its_own(store: JobStore, client: Any) -> None:
    await store.submit(job := envelope())
    await client.hset(keys.stats(POOL, 0), "queued_jobs", "9" * 5000)
    with pytest.raises(ForeignDataError):
        await store.lane_loads(POOL, [0, 1])
    await client.hset(keys.job(JobId.parse(job.id)), "epoch", "x")
    with pytest.raises(ForeignDataError):
        await store.get(job.id)
    await client.hset(keys.job(JobId.parse(job.id)), "status", b"\xff")
    with pytest.raises(ForeignDataError):
        await store.status(job.id)
    await client.xadd(keys.events(JobId.parse(job.id)), {"x": "y"})
    await client.expire(keys.events(JobId.parse(job.id)), 60)
    with pytest.raises(ForeignDataError):
        await store.read_log(job.id)
    await wrong_type(client, keys.queue(POOL, 1, "normal", keys.bucket_of("default")))
    with pytest.raises(ForeignDataError):
        await store.submit(envelope(lane=1))


async def test_a_broken_registry_hides_no_one(store: JobStore, client: Any) -> None:
    await store.put_card(card(), BUNDLE)
    await client.sadd(keys.pools(), b"\xff\xfe", "", "a b")
    assert await store.pools() == [POOL]
    for owner in ("a", "b", "c"):
        await store.heartbeat(POOL, WorkerInfo(owner=owner), 60_000)
    await client.delete(keys.worker(POOL, "a"))
    await wrong_type(client, keys.worker(POOL, "a"))
    await client.hset(keys.worker(POOL, "b"), "info", b"\xc1")
    await client.zadd(keys.workers(POOL), {b"\xff": 2**50})
    assert [info.owner for info in await store.live_workers(POOL, 60_000)] == ["c"]
    assert "c" in await store.heartbeat(POOL, WorkerInfo(owner="c"), 60_000)


async def test_a_card_that_does_not_decode_is_written_again_by_a_member(store: JobStore, client: Any) -> None:
    await store.put_card(card(), BUNDLE)
    await client.hset(keys.card(POOL), "card", b"\xc1")
    assert await store.put_card(card(), BUNDLE) == card()
    assert await store.get_card(POOL) == card()
