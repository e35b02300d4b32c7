"""cancel, release, forget, and jobs whose workers die again and again."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shared import keys
from shared.jobs import Lease, Owned, PulledJob
from shared.jobstore import JobStore
from shared.keys import GROUP, JobId
from shared.protocol import Frame, Result, decode
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, last, owned, tokens

pytestmark = pytest.mark.topologies


async def start(store: JobStore, owner: str = "w", **fields: Any) -> PulledJob:
    await store.submit(envelope(**fields))
    return (await store.pull(POOL, 0, owner, budget(), KEEP)).jobs[0]


async def test_a_queued_job_is_cancelled_here_and_now(store: JobStore, client: Any) -> None:
    job = envelope(n=2)
    await store.submit(job)
    assert await store.cancel(job.id) == "cancelled"
    frame = decode((await store.read_log(job.id))[0], Frame)
    assert (frame.kind, frame.status, frame.error) == ("done", "cancelled", None)
    assert [(c.index, c.offset, c.finish) for c in frame.choices] == [(0, 0, "abort"), (1, 0, "abort")]
    result = decode((await store.get(job.id)).result or b"", Result)
    assert result.status == "cancelled" and [c.finish_reason for c in result.choices] == ["abort", "abort"]
    assert result.usage.prompt_tokens == 4 and result.error is None
    await check_lane(client, [job.id])
    assert (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs == []


async def test_cancel_again_and_after_the_end_changes_nothing(store: JobStore, client: Any) -> None:
    job = envelope()
    await store.submit(job)
    assert [await store.cancel(job.id) for _ in range(3)] == ["cancelled"] * 3
    done = await start(store)
    await store.publish([last(done, "w", 1)])
    assert await store.cancel(done.envelope.id) == "completed"
    assert (await store.status(done.envelope.id)) == ("completed", 1)
    await check_lane(client, [job.id, done.envelope.id])


@pytest.mark.parametrize("job_id", [f"pool.0.{'0' * 32}", "nonsense", ""])
async def test_cancel_of_an_unknown_job(store: JobStore, client: Any, job_id: str) -> None:
    assert await store.cancel(job_id) is None
    assert await client.dbsize() == 0


async def test_the_worker_of_a_running_job_is_told(store: JobStore, client: Any) -> None:
    job = await start(store)
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.control(POOL))
    await pubsub.get_message(timeout=5)
    assert await store.cancel(job.envelope.id) == "running"
    message = msgspec.msgpack.decode((await pubsub.get_message(timeout=5))["data"])
    assert message == {"op": "cancel", "id": job.envelope.id}
    assert (await store.get(job.envelope.id)).cancel_requested
    await pubsub.aclose()


async def test_a_cancelled_job_whose_worker_died_ends_at_the_next_pull(store: JobStore, client: Any) -> None:
    job = await start(store, owner="dead")
    await store.publish([tokens(job, "dead", 1, 2)])
    await store.cancel(job.envelope.id)
    pulled = await store.pull(POOL, 0, "w", budget(), NOW)
    assert pulled.jobs == [] and pulled.ended == {job.envelope.id: "cancelled"}
    frame = decode((await store.read_log(job.envelope.id))[-1], Frame)
    assert (frame.seq, frame.kind) == (3, "done") and frame.epoch > job.epoch
    assert [(c.offset, c.finish) for c in frame.choices] == [(2, "abort")]
    await check_lane(client, [job.envelope.id])


async def test_cancel_against_pull(store: JobStore, client: Any) -> None:
    jobs = [envelope(tenant=f"t{i}") for i in range(40)]
    for job in jobs:
        await store.submit(job)
    pulls = [store.pull(POOL, 0, f"w{i}", budget(sequences=3), KEEP) for i in range(10)]
    cancels = [store.cancel(job.id) for job in jobs]
    answers = await asyncio.gather(*(x for pair in zip(pulls, cancels[:10], strict=True) for x in pair), *cancels[10:])
    pulled = {job.envelope.id for answer in answers[0:20:2] for job in answer.jobs}
    statuses = {job.id: (await store.status(job.id))[0] for job in jobs}
    assert {job_id for job_id, status in statuses.items() if status == "running"} == pulled
    assert {job_id for job_id, status in statuses.items() if status == "cancelled"} == statuses.keys() - pulled
    await check_lane(client, [job.id for job in jobs])


async def test_release_gives_a_job_back_and_refunds_the_attempt(store: JobStore, client: Any) -> None:
    job = await start(store)
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.wake(POOL))
    await pubsub.get_message(timeout=5)
    assert await store.release("w", owned(job))
    assert (await pubsub.get_message(timeout=5))["data"] == b"0"
    view = await store.get(job.envelope.id)
    assert (view.status, view.attempts) == ("queued", 0)
    assert await client.xlen(keys.resume(POOL, 0)) == 1
    await pubsub.aclose()
    await check_lane(client, [job.envelope.id])


async def test_release_again_is_the_same_success(store: JobStore, client: Any) -> None:
    job = await start(store)
    assert [await store.release("w", owned(job)) for _ in range(3)] == [True] * 3
    assert (await store.get(job.envelope.id)).attempts == 0
    assert await store.release("w", Owned(job.envelope.id, 7)) is False
    await check_lane(client, [job.envelope.id])
    taken = (await store.pull(POOL, 0, "v", budget(), KEEP)).jobs[0]
    assert await store.release("w", owned(job)) is False
    await store.publish([last(taken, "v", 1)])
    assert await store.release("v", owned(taken)) is False
    await check_lane(client, [job.envelope.id])


async def test_a_cancel_wins_over_a_release(store: JobStore, client: Any) -> None:
    job = await start(store)
    await store.cancel(job.envelope.id)
    assert await store.release("w", owned(job))
    assert (await store.status(job.envelope.id)) == ("cancelled", 1)
    await check_lane(client, [job.envelope.id])


async def test_a_released_job_can_be_cancelled(store: JobStore, client: Any) -> None:
    job = await start(store)
    await store.release("w", owned(job))
    assert await store.cancel(job.envelope.id) == "cancelled"
    await check_lane(client, [job.envelope.id])


async def test_release_against_reclaim(store: JobStore, client: Any) -> None:
    jobs = [await start(store) for _ in range(20)]
    released, pulled = await asyncio.gather(
        asyncio.gather(*(store.release("w", owned(job)) for job in jobs)),
        store.pull(POOL, 0, "v", budget(suspects=100), NOW),
    )
    taken = {job.envelope.id for job in pulled.jobs}
    rest = await store.pull(POOL, 0, "v", budget(suspects=100), NOW)
    assert {job.envelope.id for job in rest.jobs} | taken == {job.envelope.id for job in jobs}
    assert released.count(True) >= len(rest.jobs)
    await check_lane(client, [job.envelope.id for job in jobs])


async def test_forget_deletes_only_consumers_with_nothing_pending(store: JobStore, client: Any) -> None:
    done, held = await start(store), await start(store, job_class="high")
    await store.publish([last(done, "w", 1)])
    assert await store.forget(POOL, "w", 16) == 1
    normal, high = (keys.queue(POOL, 0, c, keys.bucket_of("default")) for c in ("normal", "high"))
    assert await client.xinfo_consumers(normal, GROUP) == []
    assert [c["name"] for c in await client.xinfo_consumers(high, GROUP)] == [b"w"]
    await check_lane(client, [done.envelope.id, held.envelope.id])
    await store.publish([last(held, "w", 1)])
    assert await store.forget(POOL, "w", 16) == 0
    assert await client.xinfo_consumers(high, GROUP) == []
    assert not await client.exists(keys.last_pull(POOL, 0, "w"))
    assert await store.forget(POOL, "nobody", 16) == 0


async def test_a_reclaim_is_charged_only_if_told_so(store: JobStore) -> None:
    await start(store, owner="a")
    free = (await store.pull(POOL, 0, "b", budget(), Lease(lease_ms=0, charge=False))).jobs[0]
    assert (free.epoch, free.attempts, free.suspect) == (2, 1, False)
    charged = (await store.pull(POOL, 0, "c", budget(), NOW)).jobs[0]
    assert (charged.epoch, charged.attempts, charged.suspect) == (3, 2, False)
    again = (await store.pull(POOL, 0, "d", budget(), NOW)).jobs[0]
    assert (again.epoch, again.attempts, again.suspect) == (4, 3, True)


async def test_a_taken_over_job_says_whose_it_was_and_since_when(store: JobStore, client: Any) -> None:
    first = await start(store, owner="first")
    assert first.lost_by == "" and first.since_ms == first.queue_ms
    job_id = first.envelope.id
    await client.hincrby(keys.job(JobId.parse(job_id)), "taken_us", -5_000_000)
    (second,) = (await store.pull(POOL, 0, "second", budget(), Lease(lease_ms=0))).jobs
    assert second.lost_by == "first" and 5_000 <= second.since_ms < 5_000 + second.queue_ms
    assert await store.release("second", Owned(job_id, second.epoch))
    (third,) = (await store.pull(POOL, 0, "third", budget(), Lease())).jobs
    assert third.lost_by == "" and third.since_ms < 5_000, "given back is not lost"


async def test_suspects_come_in_small_groups(store: JobStore, client: Any) -> None:
    jobs = [await start(store, owner="dead") for _ in range(10)]
    assert len((await store.pull(POOL, 0, "next", budget(suspects=0), NOW)).jobs) == 10, "one death condemns nobody"
    for expected in (3, 3, 3, 1):
        assert len((await store.pull(POOL, 0, "w", budget(suspects=3), NOW)).jobs) == expected
    await check_lane(client, [job.envelope.id for job in jobs])


async def test_a_job_that_killed_three_workers_runs_alone(store: JobStore, client: Any) -> None:
    one, two = await start(store, owner="a"), await start(store, owner="a")
    for owner in ("b", "b2"):
        await store.pull(POOL, 0, owner, budget(), NOW)
    await store.submit(other := envelope())
    busy = await store.pull(POOL, 0, "c", budget(), NOW)
    assert [job.envelope.id for job in busy.jobs] == [other.id] and busy.alone_waiting == 2
    idle = await store.pull(POOL, 0, "d", budget(idle=True), NOW)
    assert len(idle.jobs) == 1 and idle.jobs[0].alone and idle.jobs[0].attempts == 4
    second = await store.pull(POOL, 0, "e", budget(idle=True), Lease(lease_ms=60_000))
    assert second.jobs == []
    await check_lane(client, [one.envelope.id, two.envelope.id, other.id])


@pytest.mark.parametrize(("most", "deaths"), [(1, 5), (5, 5), (6, 6), (8, 8)])
async def test_more_than_five_attempts_allow_more_than_five_deaths(store: JobStore, most: int, deaths: int) -> None:
    job = await start(store, owner="w0")
    lease = Lease(lease_ms=0, max_attempts=most)
    for number in range(1, deaths):
        assert len((await store.pull(POOL, 0, f"w{number}", budget(idle=True), lease)).jobs) == 1
    assert (await store.pull(POOL, 0, "last", budget(idle=True), lease)).buried == [job.envelope.id]


async def test_a_killer_is_buried_after_it_was_alone_twice(store: JobStore, client: Any) -> None:
    job = await start(store, owner="a", callback_url="https://example.test")
    await store.publish([tokens(job, "a", 1)])
    alone = [(await store.pull(POOL, 0, owner, budget(idle=True), NOW)).jobs[0].alone for owner in "bcde"]
    assert alone == [False, False, True, True]
    pulled = await store.pull(POOL, 0, "f", budget(idle=True), NOW)
    assert pulled.jobs == [] and pulled.buried == [job.envelope.id] and pulled.ended == {job.envelope.id: "failed"}
    frame = decode((await store.read_log(job.envelope.id))[-1], Frame)
    assert frame.kind == "error" and frame.error and frame.error.code == "job_failed" and frame.seq == 2
    assert decode((await store.get(job.envelope.id)).result or b"", Result).choices[0].token_ids == [1]
    letter = (await store.dead_letters(POOL, 0))[0]
    assert (letter.job_id, letter.attempts, letter.error) == (job.envelope.id, 5, frame.error)
    assert await client.xlen(keys.outbox(POOL, 0)) == 1
    await check_lane(client, [job.envelope.id])


async def test_a_job_whose_worker_was_drained_is_not_condemned(store: JobStore) -> None:
    await start(store, owner="w0")
    for i in range(1, 12):
        job = (await store.pull(POOL, 0, f"w{i}", budget(idle=True), NOW)).jobs[0]
        assert not job.suspect and not job.alone
        await store.release(f"w{i}", owned(job))
    assert (await store.get(job.envelope.id)).status == "queued"


async def test_a_given_back_job_that_must_run_alone_blocks_no_other(store: JobStore, client: Any) -> None:
    killer = await start(store, owner="a")
    for owner in ("b", "b2"):
        await store.pull(POOL, 0, owner, budget(), NOW)
    alone = (await store.pull(POOL, 0, "c", budget(idle=True), NOW)).jobs[0]
    assert alone.alone
    innocent = await start(store, owner="c")
    for job in (alone, innocent):
        await store.release("c", owned(job))
    busy = await store.pull(POOL, 0, "d", budget(), KEEP)
    assert [job.envelope.id for job in busy.jobs] == [innocent.envelope.id] and busy.alone_waiting == 1
    await check_lane(client, [killer.envelope.id, innocent.envelope.id])
    idle = await store.pull(POOL, 0, "e", budget(idle=True), KEEP)
    assert [job.envelope.id for job in idle.jobs] == [killer.envelope.id] and idle.jobs[0].alone


async def test_cancel_reaches_a_job_that_waits_to_run_alone(store: JobStore, client: Any) -> None:
    job = await start(store, owner="a")
    for owner in ("b", "b2"):
        await store.pull(POOL, 0, owner, budget(), NOW)
    await store.cancel(job.envelope.id)
    assert (await store.pull(POOL, 0, "c", budget(), NOW)).ended == {job.envelope.id: "cancelled"}
    view = await store.get(job.envelope.id)
    assert view.status == "cancelled"
    assert await client.hget(keys.job(JobId.parse(job.envelope.id)), "owner") == b""
