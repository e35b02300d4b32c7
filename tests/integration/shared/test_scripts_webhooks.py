"""Webhooks in Redis: none is lost between the end of a job and its delivery, whoever dies in between."""

from __future__ import annotations

from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import ConflictError, JobNotFoundError, NotFoundError
from shared.jobs import Lease, Lifetime
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import Head, decode
from shared.upkeep import Upkeep
from shared.webhook_calls import Claimed, Patience
from shared.webhooks import Webhooks
from tests.support.jobs import NOW, POOL, budget, check_lane, envelope, last

pytestmark = pytest.mark.topologies

URL = "https://example.test/hook"
PATIENCE = Patience(60.0, 60.0)
SHORT = Patience(0.001, 60.0)
FIELDS: dict[str, str | bytes] = {
    "url": URL, "tenant": "t", "type": "job.completed", "body": b'{"whole":1}', "brief": b"{}", "trace": "",
}  # fmt: skip


@pytest.fixture
def webhooks(commands: AsyncClient) -> Webhooks:
    return Webhooks(commands)


async def completed(store: JobStore, *, retention_s: float = 3600.0, url: str | None = URL) -> str:
    """A job that has ended well; answers its id."""
    await store.submit(envelope(callback_url=url), lifetime=Lifetime(retention_s=retention_s))
    job = (await store.pull(POOL, 0, "w", budget(), Lease())).jobs[0]
    await store.publish([last(job, "w", 1)])
    return job.envelope.id


async def taken(webhooks: Webhooks, store: JobStore, patience: Patience = PATIENCE, **lifetime: float) -> str:
    """A job whose webhook is due; answers its id."""
    job_id = await completed(store, **lifetime)
    [entry] = await webhooks.entries(POOL, 0, 10)
    assert await webhooks.take(entry, FIELDS, 7, patience)
    return job_id


async def claim(webhooks: Webhooks, most: int = 10, lease_s: float = 60.0) -> list[Claimed]:
    return (await webhooks.claim(POOL, 0, most, lease_s, PATIENCE)).claimed


async def state(webhooks: Webhooks, job_id: str) -> str | None:
    delivery = await webhooks.delivery(job_id)
    return None if delivery is None else delivery.state


async def ended_in_each_way(store: JobStore, client: Any) -> dict[str, str]:
    """Jobs that owe a webhook and have ended, by how."""
    upkeep = Upkeep(store._redis)
    found = {"completed": await completed(store)}
    cancelled = envelope(callback_url=URL)
    await store.submit(cancelled)
    await store.cancel(cancelled.id)
    late = envelope(callback_url=URL)
    await store.submit(late, lifetime=Lifetime(deadline_s=0.001))
    await upkeep.sweep_lane(POOL, 0, 0.0)
    delayed = envelope(callback_url=URL)
    await store.submit(delayed, lifetime=Lifetime(delay_s=100.0))
    await store.cancel(delayed.id)
    killer = envelope(callback_url=URL)
    await store.submit(killer)
    for owner in "abcdef":
        await store.pull(POOL, 0, owner, budget(idle=True), NOW)
    assert (await store.get(killer.id)).status == "failed"
    return found | {"cancelled": cancelled.id, "expired": late.id, "delayed": delayed.id, "buried": killer.id}


async def test_every_end_owes_one(store: JobStore, webhooks: Webhooks, client: Any) -> None:
    ended = await ended_in_each_way(store, client)
    await completed(store, url=None)
    entries = await webhooks.entries(POOL, 0, 100)
    assert sorted(entry.job_id for entry in entries) == sorted(ended.values())
    statuses = {entry.job_id: entry.status for entry in entries}
    assert [statuses[ended[how]] for how in ("completed", "cancelled", "expired", "delayed", "buried")] == [
        "completed", "cancelled", "expired", "cancelled", "failed",
    ]  # fmt: skip
    await check_lane(client, list(ended.values()))


async def test_a_job_is_kept_until_its_webhook_is_taken_over(store: JobStore, webhooks: Webhooks, client: Any) -> None:
    job_id = await completed(store, retention_s=60.0)
    name = keys.job(JobId.parse(job_id))
    assert await client.pttl(name) > 23 * 3600 * 1000 and await client.pttl(keys.outbox(POOL, 0)) > 0
    await check_lane(client, [job_id])
    [entry] = await webhooks.entries(POOL, 0, 10)
    assert await webhooks.take(entry, FIELDS, 7, PATIENCE)
    assert await client.pttl(name) <= 60_000
    await check_lane(client, [job_id])
    assert await webhooks.entries(POOL, 0, 10) == []


async def test_only_one_takes_it_over(store: JobStore, webhooks: Webhooks) -> None:
    job_id = await completed(store)
    [entry] = await webhooks.entries(POOL, 0, 10)
    assert await webhooks.take(entry, FIELDS, 7, PATIENCE)
    assert not await webhooks.take(entry, {**FIELDS, "body": b"another"}, 7, PATIENCE)
    [claimed] = await claim(webhooks)
    assert (claimed.job_id, claimed.attempt, claimed.url, claimed.body) == (job_id, 1, URL, b'{"whole":1}')
    assert await claim(webhooks) == []


async def test_a_try_of_which_nothing_is_heard_comes_due_again(store: JobStore, webhooks: Webhooks) -> None:
    job_id = await taken(webhooks, store)
    [first] = await claim(webhooks, lease_s=0.0)
    [second] = await claim(webhooks)
    assert (first.attempt, second.attempt) == (1, 2)
    assert await webhooks.done(first, "delivered", PATIENCE, status=200) is None, "another one is at it"
    assert await state(webhooks, job_id) == "pending"
    assert await webhooks.done(second, "delivered", PATIENCE, status=200) == "delivered"
    assert await webhooks.done(second, "delivered", PATIENCE, status=200) is None


async def test_delivered_it_is_known_as_long_as_the_job(store: JobStore, webhooks: Webhooks, client: Any) -> None:
    job_id = await taken(webhooks, store, retention_s=7 * 24 * 3600.0)
    [claimed] = await claim(webhooks)
    await webhooks.done(claimed, "delivered", PATIENCE, status=204)
    delivery = await webhooks.delivery(job_id)
    assert delivery is not None and (delivery.state, delivery.attempts, delivery.last_status) == ("delivered", 1, 204)
    parsed = JobId.parse(job_id)
    assert not await client.hexists(keys.webhook(parsed), "body")
    assert await client.pexpiretime(keys.webhook(parsed)) == await client.pexpiretime(keys.job(parsed))
    assert [survey.owed for survey in await webhooks.survey([(POOL, 0)])] == [0]


async def test_retries_until_its_time_is_over(store: JobStore, webhooks: Webhooks, client: Any) -> None:
    job_id = await taken(webhooks, store)
    [claimed] = await claim(webhooks)
    assert await webhooks.done(claimed, "retry", PATIENCE, status=500, error="it answered 500") == "pending"
    [claimed] = await claim(webhooks)
    assert claimed.attempt == 2
    assert await webhooks.done(claimed, "retry", PATIENCE, error="no answer", delay_s=61.0) == "failed"
    delivery = await webhooks.delivery(job_id)
    assert delivery is not None and (delivery.last_status, delivery.last_error) == (None, "no answer")
    assert await claim(webhooks) == []
    assert [d.job_id for d in await webhooks.listed(POOL, 0, undelivered=True, most=10)] == [job_id]
    await webhooks.redeliver(job_id, PATIENCE)
    assert await webhooks.listed(POOL, 0, undelivered=True, most=10) == []
    [claimed] = await claim(webhooks)
    assert (claimed.attempt, claimed.body) == (1, b'{"whole":1}'), "what was given up is kept whole"


async def test_whoever_dies_at_it_again_and_again_does_not_keep_it_for_ever(
    store: JobStore, webhooks: Webhooks
) -> None:
    job_id = await taken(webhooks, store, SHORT)
    assert len(await claim(webhooks, lease_s=0.0)) == 1, "one try there is in any case"
    claims = await webhooks.claim(POOL, 0, 10, 60.0, PATIENCE)
    assert (claims.claimed, claims.given_up) == ([], [job_id])
    assert await state(webhooks, job_id) == "failed"


async def test_a_try_that_was_not_made_does_not_count(store: JobStore, webhooks: Webhooks) -> None:
    await taken(webhooks, store)
    [claimed] = await claim(webhooks)
    assert await webhooks.done(claimed, "later", PATIENCE) == "pending"
    assert [again.attempt for again in await claim(webhooks)] == [1]


async def test_a_receiver_that_wants_no_more(store: JobStore, webhooks: Webhooks) -> None:
    job_id = await taken(webhooks, store)
    [claimed] = await claim(webhooks)
    assert await webhooks.done(claimed, "gone", PATIENCE, status=410) == "gone"
    assert await claim(webhooks) == [] and await state(webhooks, job_id) == "gone"


async def test_sent_once_more_after_it_was_delivered(store: JobStore, webhooks: Webhooks) -> None:
    job_id = await taken(webhooks, store)
    [claimed] = await claim(webhooks)
    await webhooks.done(claimed, "delivered", PATIENCE, status=200)
    await webhooks.redeliver(job_id, PATIENCE)
    [entry] = await webhooks.entries(POOL, 0, 10)
    assert entry.again and entry.job_id == job_id
    assert await webhooks.take(entry, FIELDS, 7, PATIENCE)
    assert not await webhooks.take(entry, FIELDS, 7, PATIENCE), "one order sends it once"
    assert [again.attempt for again in await claim(webhooks)] == [1]


async def test_what_cannot_be_sent_once_more(store: JobStore, webhooks: Webhooks) -> None:
    waiting = envelope(callback_url=URL)
    await store.submit(waiting)
    with pytest.raises(ConflictError):
        await webhooks.redeliver(waiting.id, PATIENCE)
    await store.cancel(waiting.id)
    with pytest.raises(NotFoundError):
        await webhooks.redeliver(await completed(store, url=None), PATIENCE)
    with pytest.raises(JobNotFoundError):
        await webhooks.redeliver(envelope().id, PATIENCE)


async def test_a_job_deleted_before_it_is_taken_over(store: JobStore, webhooks: Webhooks) -> None:
    job = envelope(callback_url=URL, metadata={"order": "7"})
    await store.submit(job)
    await store.delete(job.id)
    done = await completed(store)
    await store.delete(done)
    entries = await webhooks.entries(POOL, 0, 10)
    assert [(entry.job_id, entry.status) for entry in entries] == [(job.id, "cancelled"), (done, "completed")]
    assert all(entry.deleted is not None for entry in entries)
    head = decode((entries[0].deleted or {})[b"head"], Head)
    assert (head.callback_url, head.metadata) == (URL, {"order": "7"})
    assert await webhooks.take(entries[0], FIELDS, 7, PATIENCE)


async def test_a_job_deleted_before_it_is_delivered(store: JobStore, webhooks: Webhooks, client: Any) -> None:
    job_id = await taken(webhooks, store)
    await store.delete(job_id)
    [claimed] = await claim(webhooks)
    assert claimed.body == b"{}", "without the job's content"
    assert await webhooks.done(claimed, "delivered", PATIENCE, status=200) == "delivered"
    assert not await client.exists(keys.webhook(JobId.parse(job_id)))


async def test_a_job_deleted_after_it_was_given_up(store: JobStore, webhooks: Webhooks, client: Any) -> None:
    job_id = await taken(webhooks, store)
    [claimed] = await claim(webhooks)
    await webhooks.done(claimed, "gone", PATIENCE, status=410)
    await store.delete(job_id)
    assert not await client.exists(keys.webhook(JobId.parse(job_id)))
    assert await webhooks.listed(POOL, 0, undelivered=True, most=10) == []


async def test_what_somebody_else_wrote_holds_nothing_up(store: JobStore, webhooks: Webhooks, client: Any) -> None:
    for fields in (
        {"x": "y"},
        {"id": "nonsense", "status": "completed"},
        {"id": envelope(lane=1).id, "status": "failed"},
    ):
        await client.xadd(keys.outbox(POOL, 0), fields)
    job_id = await taken(webhooks, store)
    await client.zadd(keys.webhooks(POOL, 0, "due"), {"nonsense": 1, envelope().id: 2})
    strange = envelope()
    await client.set(keys.webhook(JobId.parse(strange.id)), "x", ex=60)
    await client.zadd(keys.webhooks(POOL, 0, "due"), {strange.id: 3})
    assert [claimed.job_id for claimed in await claim(webhooks)] == [job_id]
    assert [survey.due for survey in await webhooks.survey([(POOL, 0)])] == [0]


async def test_an_outbox_that_is_none_keeps_no_job_from_ending(
    store: JobStore, webhooks: Webhooks, client: Any
) -> None:
    await client.set(keys.outbox(POOL, 0), "x", ex=60)
    job_id = await completed(store)
    assert [entry.job_id for entry in await webhooks.entries(POOL, 0, 10)] == [job_id]
    await check_lane(client, [job_id])


async def test_a_survey_sees_outboxes_and_deliveries(store: JobStore, webhooks: Webhooks) -> None:
    assert [(s.owed, s.oldest_ms) for s in await webhooks.survey([(POOL, 0), (POOL, 1)])] == [(0, None)] * 2
    await taken(webhooks, store)
    await completed(store)
    [survey] = await webhooks.survey([(POOL, 0)])
    assert (survey.outbox, survey.due, survey.owed, survey.oldest_ms) == (1, 1, 2, 7)


async def test_outcomes_are_counted(webhooks: Webhooks) -> None:
    await webhooks.count({"delivered": 2})
    await webhooks.count({"delivered": 1, "try:timeout": 4})
    assert await webhooks.counts() == {"delivered": 3, "try:timeout": 4}
