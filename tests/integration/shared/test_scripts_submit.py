"""submit: limits, repeats, keys and their expiry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from shared import keys, scripts
from shared.errors import OverloadedError, ProtocolError
from shared.jobs import LaneLimits, Lifetime
from shared.jobstore import JobStore
from shared.keys import JobId
from tests.support.jobs import KEEP, POOL, budget, check_lane, envelope, last, owned

pytestmark = pytest.mark.topologies


async def test_a_job_is_stored_as_it_was_submitted(store: JobStore, client: Any) -> None:
    job = envelope(tenant="t", metadata={"a": "b"}, callback_url="https://example.test/")
    before = await store.now_ms()
    submitted = await store.submit(job, lifetime=Lifetime(deadline_s=10, max_run_s=5, retention_s=3))
    view = await store.get(job.id)
    assert (submitted.duplicate, submitted.queued_jobs, submitted.queued_tokens) == (False, 1, 10)
    assert view.envelope == job and view.status == "queued" and view.result is None
    assert before <= view.submitted_ms <= await store.now_ms()
    assert view.deadline_ms == view.submitted_ms + 10_000
    assert await client.pexpiretime(keys.job(JobId.parse(job.id))) == view.deadline_ms + 8_000
    await check_lane(client, [job.id])


async def test_the_same_id_again_changes_nothing(store: JobStore, client: Any) -> None:
    job = envelope()
    first = await store.submit(job)
    job.prompt_token_ids = [9] * 100
    again = await store.submit(job)
    assert (first.duplicate, again.duplicate, again.queued_jobs) == (False, True, 1)
    assert len((await store.get(job.id)).envelope.prompt_token_ids) == 4
    await check_lane(client, [job.id])


async def test_an_ended_job_is_not_submitted_again(store: JobStore, client: Any) -> None:
    job = envelope()
    await store.submit(job)
    await store.cancel(job.id)
    assert (await store.submit(job)).duplicate
    assert (await store.status(job.id))[0] == "cancelled"
    await check_lane(client, [job.id])


async def test_many_submits_of_one_id_at_once_make_one_job(store: JobStore, client: Any) -> None:
    job = envelope()
    answers = await asyncio.gather(*(store.submit(job) for _ in range(20)))
    assert sorted(a.duplicate for a in answers) == [False] + [True] * 19
    await check_lane(client, [job.id])


async def test_the_limit_of_jobs_is_exact_also_under_concurrency(store: JobStore, client: Any) -> None:
    jobs = [envelope() for _ in range(40)]
    limits = LaneLimits(max_queued_jobs=25)
    answers = await asyncio.gather(*(store.submit(job, limits=limits) for job in jobs), return_exceptions=True)
    accepted = [job.id for job, answer in zip(jobs, answers, strict=True) if not isinstance(answer, Exception)]
    refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
    assert len(accepted) == 25 and len(refused) == 15
    assert all(error.retry_after and error.status == 429 for error in refused)
    await check_lane(client, accepted)


async def test_the_limit_of_tokens_is_exact(store: JobStore, client: Any) -> None:
    limits = LaneLimits(max_queued_jobs=None, max_queued_tokens=25)
    small, big = envelope(), envelope(prompt=10)
    await store.submit(small, limits=limits)
    with pytest.raises(OverloadedError):
        await store.submit(big, limits=limits)
    assert not await client.exists(keys.job(JobId.parse(big.id)))
    other = envelope(prompt=9)
    assert (await store.submit(other, limits=limits)).queued_tokens == 25
    await check_lane(client, [small.id, other.id])


async def test_a_running_job_makes_room_in_the_queue(store: JobStore) -> None:
    limits = LaneLimits(max_queued_jobs=1)
    await store.submit(envelope(), limits=limits)
    assert len((await store.pull(POOL, 0, "w", budget(), KEEP)).jobs) == 1
    await store.submit(envelope(), limits=limits)


async def test_submit_rings_wake_with_the_lane(store: JobStore, client: Any) -> None:
    pubsub = client.pubsub()
    await pubsub.subscribe(keys.wake(POOL))
    assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
    job = envelope(lane=7)
    await store.submit(job)
    message = await pubsub.get_message(timeout=5)
    assert message["data"] == b"7"
    await pubsub.aclose()


async def test_every_key_of_an_idle_lane_has_an_expiry(store: JobStore, client: Any) -> None:
    done, given_back = envelope(), envelope(job_class="high")
    for job in (done, given_back):
        await store.submit(job)
    pulled = await store.pull(POOL, 0, "w", budget(), KEEP)
    by_id = {job.envelope.id: job for job in pulled.jobs}
    await store.publish([last(by_id[done.id], "w", 1)])
    await store.release("w", owned(by_id[given_back.id]))
    names = [name async for name in client.scan_iter("*")]
    assert len(names) >= 6
    assert {name: await client.pttl(name) for name in names if await client.pttl(name) < 0} == {}


async def test_a_shared_key_lives_as_long_as_its_longest_job(store: JobStore, client: Any) -> None:
    long, short = envelope(), envelope()
    await store.submit(long, lifetime=Lifetime(deadline_s=1000))
    until = await client.pexpiretime(keys.stats(POOL, 0))
    await store.submit(short, lifetime=Lifetime(deadline_s=10))
    assert await client.pexpiretime(keys.stats(POOL, 0)) == until


@pytest.mark.parametrize("job_id", ["", "x", "pool.0.zz", "pool.999." + "0" * 32, "po ol.0." + "0" * 32])
async def test_a_malformed_id_is_refused(store: JobStore, client: Any, job_id: str) -> None:
    job = envelope()
    job.id = job_id
    with pytest.raises(ProtocolError):
        await store.submit(job)
    assert await client.dbsize() == 0


async def test_an_unknown_class_is_refused(store: JobStore, client: Any) -> None:
    job = envelope()
    job.job_class = "urgent"  # type: ignore[assignment]
    with pytest.raises(ProtocolError):
        await store.submit(job)
    assert await client.dbsize() == 0


async def test_arguments_are_checked_before_the_first_write(client: Any) -> None:
    good = scripts.submit(envelope(), Lifetime(), LaneLimits()).command
    # EVALSHA, sha, number of keys, six keys (the stream is the second), then the arguments: cost is the fifth, deadline
    # the eighth.
    wrong = {4: good[4].replace("normal", "batch"), 13: "x", 16: "soon"}
    for position, value in wrong.items():
        bad = [*good[:position], value, *good[position + 1 :]]
        with pytest.raises(redis.ResponseError, match="RWARG"):
            await client.execute_command("EVAL", scripts.load("submit").text, *bad[2:])
    assert await client.dbsize() == 0
