"""publish and renew: the log, the fence, the end of a job; the same from sync code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared import keys
from shared.connect import connect_sync
from shared.errors import ProtocolError
from shared.jobs import Lifetime, Publication, Publish, PulledJob
from shared.jobstore import JobStore, SyncJobStore
from shared.keys import GROUP, JobId
from shared.protocol import Frame, Result, decode
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, frame, last, owned, tokens

pytestmark = pytest.mark.topologies
FINE, CANCELLED, FENCED = Publication.FINE, Publication.CANCELLED, Publication.FENCED


async def running(store: JobStore, owner: str = "w", **fields: Any) -> PulledJob:
    await store.submit(envelope(**fields))
    return (await store.pull(POOL, 0, owner, budget(), KEEP)).jobs[0]


@pytest.fixture
def sync_store(redis_url: str) -> Iterator[SyncJobStore]:
    client = connect_sync(redis_url)
    yield SyncJobStore(client)
    client.close()


async def test_frames_reach_log_and_channel_in_order(store: JobStore, client: Any) -> None:
    job = await running(store)
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.events(JobId.parse(job.envelope.id)))
    await pubsub.get_message(timeout=5)
    first, second = tokens(job, "w", 1, 2), tokens(job, "w", 3)
    assert await store.publish([first, second]) == [FINE, FINE]
    sent = [(await pubsub.get_message(timeout=5))["data"] for _ in range(3)]
    assert sent == [*first.frames, *second.frames] == await store.read_log(job.envelope.id)
    assert await store.read_log(job.envelope.id, after_seq=2) == second.frames
    assert await store.read_log(job.envelope.id, count=1) == first.frames[:1]
    await pubsub.aclose()
    await check_lane(client, [job.envelope.id])


async def test_what_is_large_is_in_the_log_and_an_empty_message_stands_for_it(store: JobStore, client: Any) -> None:
    job = await running(store)
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.events(JobId.parse(job.envelope.id)))
    await pubsub.get_message(timeout=5)
    frames = [frame(job.epoch, seq, text="x" * size) for seq, size in ((1, 1), (2, 65_000), (3, 70_000), (4, 1))]
    assert await store.publish([Publish(job.envelope.id, "w", job.epoch, 1, frames)]) == [FINE]
    sent = [(await pubsub.get_message(timeout=5))["data"] for _ in range(4)]
    assert sent == [*frames[:2], b"", frames[3]]
    assert await store.read_log(job.envelope.id) == frames
    await pubsub.aclose()


async def test_the_log_expires_with_its_job(store: JobStore, client: Any) -> None:
    job = await running(store)
    await store.publish([tokens(job, "w", 1)])
    name = JobId.parse(job.envelope.id)
    assert await client.pexpiretime(keys.events(name)) == await client.pexpiretime(keys.job(name)) > 0


async def test_a_repeat_is_a_success_and_writes_nothing(store: JobStore, client: Any) -> None:
    job = await running(store)
    await store.publish([tokens(job, "w", 1, 3)])
    assert await store.publish([tokens(job, "w", 1, 3), tokens(job, "w", 2), tokens(job, "w", 3, 2)]) == [FINE] * 3
    assert len(await store.read_log(job.envelope.id)) == 4
    await check_lane(client, [job.envelope.id])


async def test_a_gap_is_refused_and_the_others_are_published(store: JobStore, client: Any) -> None:
    good, bad = await running(store), await running(store)
    await store.publish([tokens(bad, "w", 1)])
    items = [tokens(bad, "w", 3), tokens(good, "w", 1)]
    with pytest.raises(ProtocolError, match="frame 3 follows frame 1"):
        await store.publish(items)
    assert len(await store.read_log(bad.envelope.id)) == 1
    assert len(await store.read_log(good.envelope.id)) == 1
    await check_lane(client, [good.envelope.id, bad.envelope.id])


async def test_the_last_frame_ends_the_job(store: JobStore, client: Any) -> None:
    job = await running(store)
    until = await client.pexpiretime(keys.job(JobId.parse(job.envelope.id)))
    ending = last(job, "w", 2)
    assert await store.publish([tokens(job, "w", 1), ending]) == [FINE, FINE]
    view = await store.get(job.envelope.id)
    assert ending.ending and (view.status, view.result) == ("completed", ending.ending.result)
    assert view.submitted_ms <= view.started_ms <= view.finished_ms <= await store.now_ms()
    for name in (keys.job(JobId.parse(job.envelope.id)), keys.events(JobId.parse(job.envelope.id))):
        assert 0 < await client.pexpiretime(name) < until
    assert await client.xlen(keys.outbox(POOL, 0)) == 0
    assert await store.lane_load(POOL, 0) == await store.pool_load(POOL, 16)
    await check_lane(client, [job.envelope.id])


async def test_retention_is_the_jobs_own(store: JobStore, client: Any) -> None:
    await store.submit(envelope(), lifetime=Lifetime(retention_s=7))
    job = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await store.publish([last(job, "w", 1)])
    assert 0 < await client.pttl(keys.job(JobId.parse(job.envelope.id))) <= 7000
    assert 0 < await client.pttl(keys.events(JobId.parse(job.envelope.id))) <= 7000


async def test_the_last_frame_twice_ends_the_job_once(store: JobStore, client: Any) -> None:
    job = await running(store, callback_url="https://example.test/")
    ending = last(job, "w", 1)
    answers = await asyncio.gather(*(store.publish([ending]) for _ in range(10)))
    assert answers == [[FINE]] * 10
    assert await client.xlen(keys.outbox(POOL, 0)) == 1
    entry = (await client.xrange(keys.outbox(POOL, 0)))[0][1]
    assert entry == {b"id": job.envelope.id.encode(), b"status": b"completed"}
    assert await store.publish([tokens(job, "w", 2)]) == [FENCED]
    assert await store.publish([last(job, "other", 1)]) == [FENCED]
    await check_lane(client, [job.envelope.id])


async def test_an_end_without_frames_is_refused(store: JobStore, client: Any) -> None:
    job = await running(store)
    with pytest.raises(ProtocolError):
        await store.publish([replace(last(job, "w", 1), frames=[])])
    await check_lane(client, [job.envelope.id])
    assert (await store.status(job.envelope.id)) == ("running", 0)


async def test_a_zombie_publishes_not_one_token(store: JobStore, client: Any) -> None:
    zombie = await running(store, owner="zombie")
    await store.publish([tokens(zombie, "zombie", 1, 2)])
    heir = (await store.pull(POOL, 0, "heir", budget(), NOW)).jobs[0]
    assert (heir.epoch, heir.last_seq, heir.attempts, heir.suspect) == (2, 2, 2, False)
    assert await store.publish([tokens(zombie, "zombie", 3), last(zombie, "zombie", 3)]) == [FENCED, FENCED]
    assert await store.renew("zombie", [owned(zombie)]) == [FENCED]
    assert await store.release("zombie", owned(zombie)) is False
    assert await store.publish([last(heir, "heir", 3)]) == [FINE]
    epochs = [decode(f, Frame).epoch for f in await store.read_log(heir.envelope.id)]
    assert epochs == [1, 1, 2]
    await check_lane(client, [heir.envelope.id])


async def test_the_same_owner_with_an_old_epoch_is_fenced(store: JobStore) -> None:
    old = await running(store)
    await store.release("w", owned(old))
    new = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    assert await store.publish([tokens(old, "w", 1)]) == [FENCED]
    assert await store.renew("w", [owned(old), owned(new)]) == [FENCED, FINE]
    assert await store.release("w", owned(old)) is False
    assert await store.publish([tokens(new, "w", 1)]) == [FINE]


@pytest.mark.parametrize("job_id", [f"pool.0.{'0' * 32}"])
async def test_an_unknown_job_is_fenced(store: JobStore, client: Any, job_id: str) -> None:
    assert await store.publish([Publish(job_id, "w", 1, 1, [b"x"])]) == [FENCED]
    assert await client.dbsize() == 0


async def test_renew_keeps_the_job_and_its_delivery_count(store: JobStore, client: Any) -> None:
    job = await running(store)
    stream = keys.queue(POOL, 0, "normal", keys.bucket_of("default"))
    before = (await client.xpending_range(stream, GROUP, "-", "+", 1))[0]
    await client.xclaim(stream, GROUP, "w", 0, [before["message_id"]], idle=90_000, justid=True)
    assert await store.renew("w", [owned(job)]) == [FINE]
    after = (await client.xpending_range(stream, GROUP, "-", "+", 1))[0]
    assert after["time_since_delivered"] < 60_000 and after["times_delivered"] == before["times_delivered"]
    assert await store.renew("v", [owned(job)]) == [FENCED]
    assert (await client.xpending_range(stream, GROUP, "-", "+", 1))[0]["consumer"] == b"w"


async def test_publish_and_renew_tell_of_a_cancel(store: JobStore, client: Any) -> None:
    job = await running(store)
    assert await store.cancel(job.envelope.id) == "running"
    assert await store.publish([tokens(job, "w", 1)]) == [CANCELLED]
    assert await store.renew("w", [owned(job)]) == [CANCELLED]
    assert await store.publish([last(job, "w", 2, "cancelled")]) == [FINE]
    assert (await store.status(job.envelope.id)) == ("cancelled", 2)
    await check_lane(client, [job.envelope.id])


async def test_renew_against_reclaim_leaves_one_owner(store: JobStore, client: Any) -> None:
    jobs = [await running(store) for _ in range(20)]
    renewed, pulled = await asyncio.gather(
        store.renew("w", [owned(job) for job in jobs]),
        store.pull(POOL, 0, "v", budget(suspects=100), NOW),
    )
    taken = {job.envelope.id for job in pulled.jobs}
    kept = await store.renew("w", [owned(job) for job in jobs])
    assert len(renewed) == 20
    assert [answer is FENCED for answer in kept] == [job.envelope.id in taken for job in jobs]
    await check_lane(client, [job.envelope.id for job in jobs])


async def test_threads_use_the_same_scripts(store: JobStore, sync_store: SyncJobStore, client: Any) -> None:
    jobs = [await running(store) for _ in range(3)]
    items = [tokens(job, "w", 1, 2) for job in jobs]
    assert await asyncio.to_thread(sync_store.publish, items) == [FINE] * 3
    assert await asyncio.to_thread(sync_store.renew, "w", [owned(job) for job in jobs]) == [FINE] * 3
    assert await asyncio.to_thread(sync_store.release, "w", owned(jobs[0])) is True
    assert await asyncio.to_thread(sync_store.release, "v", owned(jobs[1])) is False
    await client.script_flush()
    assert await asyncio.to_thread(sync_store.publish, [last(jobs[1], "w", 3), tokens(jobs[0], "w", 3)]) == [
        FINE,
        FENCED,
    ]
    with pytest.raises(ProtocolError):
        await asyncio.to_thread(sync_store.publish, [tokens(jobs[2], "w", 9)])
    assert sync_store.publish([]) == [] and sync_store.renew("w", []) == []
    result = decode((await store.get(jobs[1].envelope.id)).result or b"", Result)
    assert result.status == "completed"
    await check_lane(client, [job.envelope.id for job in jobs])


async def test_every_field_of_a_jobs_hash_and_of_stats_is_documented(store: JobStore, client: Any) -> None:
    job = envelope(callback_url="https://example.test/")
    await store.submit(job, lifetime=Lifetime(delay_s=0.001), attachment=b"mine")
    await asyncio.sleep(0.01)
    await store.pull(POOL, 0, "dead", budget(), KEEP)
    job = (await store.pull(POOL, 0, "w", budget(), NOW)).jobs[0]
    await store.cancel(job.envelope.id)
    await store.publish([last(job, "w", 1, "cancelled")])
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text("utf-8")
    fields = {name.decode() for name in await client.hgetall(keys.job(JobId.parse(job.envelope.id)))}
    assert {name for name in fields if f"`{name}`" not in page} == set()
    counters = {name.decode().partition(":")[0] for name in await client.hgetall(keys.stats(POOL, 0))}
    assert {name for name in counters if f"`{name}" not in page} == set()
