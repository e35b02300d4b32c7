"""pull: budgets, order, fairness, what ends there, and answers that get lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shared import keys
from shared.jobs import Lease, PullBudget
from shared.jobstore import JobStore
from shared.keys import GROUP, JobId
from shared.protocol import Envelope, Frame, Result, decode
from tests.support.jobs import (
    KEEP,
    NOW,
    POOL,
    budget,
    check_lane,
    envelope,
    last,
    owned,
    tenants_of_different_buckets,
    tokens,
)

pytestmark = pytest.mark.topologies


async def age(client: Any, job_id: str, seconds: float) -> None:
    """Make a queued job look as if it had waited."""
    name = keys.job(JobId.parse(job_id))
    submitted = int(await client.hget(name, "submitted_us"))
    await client.hset(name, "submitted_us", submitted - int(seconds * 1e6))


async def submit_all(store: JobStore, jobs: list[Envelope]) -> list[str]:
    for job in jobs:
        await store.submit(job)
    return [job.id for job in jobs]


def ids(pulled: Any) -> list[str]:
    return [job.envelope.id for job in pulled.jobs]


async def test_an_empty_lane_costs_one_read(store: JobStore, client: Any) -> None:
    await store.submit(envelope(lane=1))
    await store.pull(POOL, 0, "w", budget(), KEEP)
    await client.config_resetstat()
    await store.pull(POOL, 0, "w", budget(), KEEP)
    calls = {k: v["calls"] for k, v in (await client.info("commandstats")).items()}
    calls.pop("cmdstat_config|resetstat", None)
    assert calls == {"cmdstat_evalsha": 1, "cmdstat_hmget": 1}


async def test_what_is_pulled_is_the_callers(store: JobStore, client: Any) -> None:
    job = envelope()
    await store.submit(job)
    pulled = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    assert pulled.envelope == job
    assert (pulled.epoch, pulled.attempts, pulled.last_seq, pulled.suspect, pulled.alone) == (1, 1, 0, False, False)
    assert pulled.queue_ms >= 0
    view = await store.get(job.id)
    assert (view.status, view.epoch, view.deadline_ms) == ("running", 1, pulled.deadline_ms)
    assert view.started_ms >= view.submitted_ms
    await check_lane(client, [job.id])


async def test_one_job_goes_to_one_of_many_pullers(store: JobStore, client: Any) -> None:
    jobs = [envelope(lane=0, tenant=f"t{i}") for i in range(60)]
    await submit_all(store, jobs)
    answers = await asyncio.gather(*(store.pull(POOL, 0, f"w{i}", budget(sequences=7), KEEP) for i in range(12)))
    taken = [job_id for answer in answers for job_id in ids(answer)]
    assert sorted(taken) == sorted(job.id for job in jobs)
    await check_lane(client, taken)


async def test_the_budget_of_sequences_and_of_tokens_holds(store: JobStore, client: Any) -> None:
    jobs = await submit_all(store, [envelope(n=2) for _ in range(5)])
    assert len(ids(await store.pull(POOL, 0, "a", budget(sequences=5), KEEP))) == 2
    assert len(ids(await store.pull(POOL, 0, "b", budget(tokens=20), KEEP))) == 1
    assert ids(await store.pull(POOL, 0, "c", budget(tokens=19), KEEP)) == []
    assert ids(await store.pull(POOL, 0, "c", budget(sequences=1), KEEP)) == []
    await check_lane(client, jobs)


async def test_a_higher_class_spends_what_is_left_for_lower_ones(store: JobStore) -> None:
    high, low = envelope(job_class="high"), envelope(job_class="batch")
    await submit_all(store, [low, high])
    room = PullBudget({"high": 2, "normal": 1, "batch": 1}, dict.fromkeys(keys.CLASSES, 10**6), 10**6)
    assert ids(await store.pull(POOL, 0, "w", room, KEEP)) == [high.id]
    assert ids(await store.pull(POOL, 0, "w", room, KEEP)) == [low.id]


async def test_classes_come_in_order_and_jobs_of_a_bucket_as_they_came(store: JobStore) -> None:
    batch, normal, first, second = (
        envelope(job_class="batch"), envelope(), envelope(job_class="high"), envelope(job_class="high"),
    )  # fmt: skip
    await submit_all(store, [batch, normal, first, second])
    assert ids(await store.pull(POOL, 0, "w", budget(), KEEP)) == [first.id, second.id, normal.id, batch.id]


async def test_a_flood_of_one_tenant_does_not_delay_another(store: JobStore) -> None:
    flood, other = tenants_of_different_buckets(2)
    await submit_all(store, [envelope(tenant=flood, prompt=500) for _ in range(50)])
    small = await submit_all(store, [envelope(tenant=other) for _ in range(5)])
    taken: list[str] = []
    for _ in range(8):
        taken += ids(await store.pull(POOL, 0, "w", budget(sequences=1), KEEP))
    assert set(small) <= set(taken)


async def test_buckets_share_by_tokens_not_by_jobs(store: JobStore) -> None:
    big, small = tenants_of_different_buckets(2)
    await submit_all(store, [envelope(tenant=big, prompt=994) for _ in range(100)])
    await submit_all(store, [envelope(tenant=small, prompt=94) for _ in range(400)])
    served = {big: 0, small: 0}
    for _ in range(120):
        for job in (await store.pull(POOL, 0, "w", budget(sequences=2, tokens=2000), KEEP)).jobs:
            served[job.envelope.tenant] += job.envelope.cost_tokens
    assert min(served.values()) > 0
    assert max(served.values()) / min(served.values()) < 1.25, served


async def test_a_tenants_weight_is_its_share_of_the_tokens(store: JobStore) -> None:
    heavy, light = tenants_of_different_buckets(2)
    await submit_all(store, [envelope(tenant=heavy, prompt=194, weight=4.0) for _ in range(300)])
    await submit_all(store, [envelope(tenant=light, prompt=194) for _ in range(300)])
    served = {heavy: 0, light: 0}
    for _ in range(100):
        for job in (await store.pull(POOL, 0, "w", budget(sequences=2), KEEP)).jobs:
            served[job.envelope.tenant] += 1
    assert 3.2 < served[heavy] / served[light] < 4.8, served


@pytest.mark.parametrize("weight", [b"0", b"-1", b"nan", b"1e300", b"much", b""])
async def test_a_weight_that_is_none_is_one(store: JobStore, client: Any, weight: bytes) -> None:
    (job,) = await submit_all(store, [envelope(prompt=5000)])
    await client.hset(keys.job(JobId.parse(job)), "weight", weight)
    assert ids(await store.pull(POOL, 0, "w", budget(), KEEP)) == [job]


async def test_costs_far_above_the_quantum_are_served(store: JobStore) -> None:
    jobs = await submit_all(store, [envelope(tenant=t, prompt=50_000) for t in tenants_of_different_buckets(3)])
    assert sorted(ids(await store.pull(POOL, 0, "w", budget(), KEEP))) == sorted(jobs)


async def test_a_job_that_does_not_fit_lets_others_by_until_it_has_waited_long(store: JobStore, client: Any) -> None:
    one, two = tenants_of_different_buckets(2)
    big = envelope(tenant=one, prompt=200)
    small = [envelope(tenant=two) for _ in range(2)]
    await submit_all(store, [big, *small])
    room = budget(sequences=1, tokens=100)
    assert ids(await store.pull(POOL, 0, "w", room, KEEP)) == [small[0].id]
    await age(client, big.id, 2)
    assert ids(await store.pull(POOL, 0, "w", room, KEEP)) == []
    assert ids(await store.pull(POOL, 0, "w", budget(sequences=1), KEEP)) == [big.id]


async def test_a_job_too_large_for_a_worker_is_left_for_another(store: JobStore, client: Any) -> None:
    one, two = tenants_of_different_buckets(2)
    big, small = envelope(tenant=one, prompt=500), envelope(tenant=two)
    await submit_all(store, [big, small])
    await age(client, big.id, 100)
    assert ids(await store.pull(POOL, 0, "w", budget(max_job=100, idle=True), KEEP)) == [small.id]
    assert ids(await store.pull(POOL, 0, "v", budget(max_job=506), KEEP)) == [big.id]


async def test_an_idle_worker_takes_a_job_with_more_sequences_than_it_has(store: JobStore) -> None:
    job = envelope(n=100)
    await store.submit(job)
    assert ids(await store.pull(POOL, 0, "w", budget(sequences=8), KEEP)) == []
    assert ids(await store.pull(POOL, 0, "w", budget(sequences=8, idle=True), KEEP)) == [job.id]


async def test_a_batch_job_does_not_wait_for_ever(store: JobStore, client: Any) -> None:
    batch = envelope(job_class="batch")
    await store.submit(batch)
    await submit_all(store, [envelope(job_class="high") for _ in range(3)])
    assert batch.id not in ids(await store.pull(POOL, 0, "w", budget(sequences=1), KEEP))
    await age(client, batch.id, 31)
    assert ids(await store.pull(POOL, 0, "w", budget(sequences=1), KEEP)) == [batch.id]


async def test_jobs_that_were_given_back_go_first(store: JobStore, client: Any) -> None:
    given_back = envelope(job_class="batch")
    await store.submit(given_back)
    held = (await store.pull(POOL, 0, "old", budget(), KEEP)).jobs[0]
    await store.publish([tokens(held, "old", 1, 3)])
    fresh = envelope(job_class="high")
    await store.submit(fresh)
    assert await store.release("old", owned(held))
    pulled = await store.pull(POOL, 0, "new", budget(), KEEP)
    assert ids(pulled) == [given_back.id, fresh.id]
    again = pulled.jobs[0]
    assert (again.epoch, again.attempts, again.last_seq, again.suspect) == (2, 1, 3, False)
    await check_lane(client, [given_back.id, fresh.id])


async def test_an_expired_job_ends_where_it_would_have_been_pulled(store: JobStore, client: Any) -> None:
    job, log_reader = envelope(n=2, callback_url="https://example.test"), client.pubsub()
    await store.submit(job)
    await client.hset(keys.job(JobId.parse(job.id)), "deadline_ms", 1)
    await log_reader.subscribe(keys.events(JobId.parse(job.id)))
    await log_reader.get_message(timeout=5)
    pulled = await store.pull(POOL, 0, "w", budget(), KEEP)
    assert (pulled.jobs, pulled.ended, pulled.buried) == ([], {job.id: "expired"}, [])
    sent = decode((await log_reader.get_message(timeout=5))["data"], Frame)
    assert [decode(f, Frame) for f in await store.read_log(job.id)] == [sent]
    assert (sent.kind, sent.status, sent.seq, sent.last) == ("error", "expired", 1, True)
    assert sent.error and (sent.error.status, sent.error.code) == (504, "deadline_exceeded")
    view = await store.get(job.id)
    assert view.result is not None and view.finished_ms >= view.submitted_ms
    result = decode(view.result, Result)
    assert result.status == "expired" and result.error == sent.error and result.usage.prompt_tokens == 4
    assert [(c.index, c.finish_reason) for c in result.choices] == [(0, "error"), (1, "error")]
    assert await client.xlen(keys.outbox(POOL, 0)) == 1
    await log_reader.aclose()
    await check_lane(client, [job.id])


async def test_an_expired_running_job_keeps_what_was_published(store: JobStore, client: Any) -> None:
    job = envelope()
    await store.submit(job)
    held = (await store.pull(POOL, 0, "dead", budget(), KEEP)).jobs[0]
    await store.publish([tokens(held, "dead", 1, 3)])
    await client.hset(keys.job(JobId.parse(job.id)), "deadline_ms", 1)
    pulled = await store.pull(POOL, 0, "w", budget(), NOW)
    assert pulled.ended == {job.id: "expired"}
    result = decode((await store.get(job.id)).result or b"", Result)
    assert (result.choices[0].token_ids, result.choices[0].text) == ([1, 2, 3], "xxx")
    assert result.usage.completion_tokens == 3
    await check_lane(client, [job.id])


@pytest.mark.parametrize("envelope_bytes", [b"\xc1", b"", b"\x80", msgspec.msgpack.encode({"v": 99})])
async def test_an_envelope_that_does_not_decode_is_buried(store: JobStore, client: Any, envelope_bytes: bytes) -> None:
    bad, good = envelope(), envelope()
    await submit_all(store, [bad, good])
    await client.hset(keys.job(JobId.parse(bad.id)), "env", envelope_bytes)
    pulled = await store.pull(POOL, 0, "w", budget(), KEEP)
    assert ids(pulled) == [good.id]
    assert pulled.ended == {bad.id: "failed"} and pulled.buried == [bad.id]
    frame = decode((await store.read_log(bad.id))[0], Frame)
    assert frame.kind == "error" and frame.error and frame.error.status == 500
    dead = await store.dead_letters(POOL, 0)
    assert [(d.job_id, d.error) for d in dead] == [(bad.id, frame.error)]
    await check_lane(client, [bad.id, good.id])


async def test_the_envelope_of_another_job_is_buried(store: JobStore, client: Any) -> None:
    job, other = envelope(), envelope()
    await store.submit(job)
    await client.hset(keys.job(JobId.parse(job.id)), "env", msgspec.msgpack.encode(other))
    assert (await store.pull(POOL, 0, "w", budget(), KEEP)).buried == [job.id]
    await check_lane(client, [job.id])


async def test_entries_without_a_job_are_dropped(store: JobStore, client: Any) -> None:
    lost, kept = envelope(), envelope()
    await submit_all(store, [lost, kept])
    await client.delete(keys.job(JobId.parse(lost.id)))
    await client.xadd(keys.queue(POOL, 0, "normal", keys.bucket_of("default")), {"junk": "1"})
    await client.xgroup_create(keys.resume(POOL, 0), GROUP, "0", mkstream=True)
    await client.expire(keys.resume(POOL, 0), 100)
    await client.xadd(keys.resume(POOL, 0), {"id": "nonsense"})
    assert ids(await store.pull(POOL, 0, "w", budget(), KEEP)) == [kept.id]
    await check_lane(client, [kept.id])


async def test_a_running_job_whose_hash_has_gone_is_dropped_by_the_next(store: JobStore, client: Any) -> None:
    lost, kept = envelope(), envelope()
    await submit_all(store, [lost, kept])
    await store.pull(POOL, 0, "old", budget(), KEEP)
    await client.delete(keys.job(JobId.parse(lost.id)))
    assert ids(await store.pull(POOL, 0, "w", budget(), NOW)) == [kept.id]
    await check_lane(client, [kept.id])


async def test_a_group_that_was_deleted_is_made_again(store: JobStore, client: Any) -> None:
    running, queued = envelope(), envelope()
    await store.submit(running)
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await store.submit(queued)
    await client.xgroup_destroy(keys.queue(POOL, 0, "normal", keys.bucket_of("default")), GROUP)
    assert ids(await store.pull(POOL, 0, "v", budget(), KEEP)) == [queued.id]
    await check_lane(client, [running.id, queued.id])
    assert [p.value for p in await store.renew("w", [owned(held)])] == ["fine"]


async def test_the_lost_answer_comes_again(store: JobStore, client: Any) -> None:
    jobs = await submit_all(store, [envelope() for _ in range(3)])
    # Another store of the same owner stands for a call whose answer was lost: this one never saw its token.
    lost = await JobStore(client).pull(POOL, 0, "w", budget(), KEEP)
    await store.submit(more := envelope())
    again = await store.pull(POOL, 0, "w", budget(), KEEP)
    assert sorted(ids(again)) == sorted(jobs)
    assert {j.envelope.id: j.epoch for j in again.jobs} == {j.envelope.id: j.epoch for j in lost.jobs}
    assert ids(await store.pull(POOL, 0, "w", budget(), KEEP)) == [more.id]
    assert ids(await store.pull(POOL, 0, "w", budget(), KEEP)) == []
    await check_lane(client, [*jobs, more.id])


async def test_the_lost_answer_leaves_out_what_others_have_taken_since(store: JobStore, client: Any) -> None:
    jobs = await submit_all(store, [envelope() for _ in range(3)])
    await JobStore(client).pull(POOL, 0, "w", budget(), KEEP)
    stolen = ids(await store.pull(POOL, 0, "thief", budget(sequences=1), NOW))
    again = await store.pull(POOL, 0, "w", budget(), KEEP)
    assert sorted([*ids(again), *stolen]) == sorted(jobs)


async def test_no_one_takes_back_from_itself(store: JobStore) -> None:
    job = envelope()
    await store.submit(job)
    await store.pull(POOL, 0, "w", budget(), KEEP)
    assert ids(await store.pull(POOL, 0, "w", budget(), NOW)) == []
    assert ids(await store.pull(POOL, 0, "v", budget(), Lease(lease_ms=60_000))) == []
    assert ids(await store.pull(POOL, 0, "v", budget(), Lease(lease_ms=0, reclaim=False))) == []
    assert ids(await store.pull(POOL, 0, "v", budget(), NOW)) == [job.id]


async def test_more_than_a_page_of_idle_entries_is_taken_back(store: JobStore, client: Any) -> None:
    jobs = await submit_all(store, [envelope() for _ in range(150)])
    await store.pull(POOL, 0, "mine", budget(sequences=100), KEEP)
    await store.pull(POOL, 0, "dead", budget(), KEEP)
    pulled = await store.pull(POOL, 0, "mine", budget(suspects=0), NOW)
    assert pulled.reclaimed == len(pulled.jobs) == 50
    assert {job.suspect for job in pulled.jobs} == {False}
    await check_lane(client, jobs)


async def test_an_ended_job_is_not_taken_back(store: JobStore, client: Any) -> None:
    job = envelope()
    await store.submit(job)
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs[0]
    await store.publish([last(held, "w", 1)])
    pulled = await store.pull(POOL, 0, "v", budget(), NOW)
    assert pulled.jobs == [] and pulled.ended == {}
    await check_lane(client, [job.id])


# --- adapters ---


def places(more: int, *has: str) -> PullBudget:
    return replace(budget(), adapters=frozenset(name * 32 for name in has), more_adapters=more)


def adapted(name: str, **fields: Any) -> Envelope:
    return envelope(adapter=name, adapter_identity=name * 32, **fields)


async def submit_new(store: JobStore, client: Any, jobs: list[Envelope]) -> list[str]:
    """However slow this machine is, they have not waited long."""
    submitted = await submit_all(store, jobs)
    for job_id in submitted:
        await age(client, job_id, -600)
    return submitted


async def test_a_caller_gets_jobs_of_its_adapters_and_of_as_many_more_as_it_has_places(
    store: JobStore, client: Any
) -> None:
    jobs = await submit_new(store, client, [adapted(name) for name in "aabbac"])
    assert ids(await store.pull(POOL, 0, "w", places(0, "a"), KEEP)) == jobs[:2]
    assert ids(await store.pull(POOL, 0, "w", places(0, "a"), KEEP)) == []
    assert ids(await store.pull(POOL, 0, "w", places(1, "a"), KEEP)) == jobs[2:5]
    assert ids(await store.pull(POOL, 0, "x", places(1), KEEP)) == jobs[5:]
    await check_lane(client, jobs)


async def test_base_jobs_and_callers_without_a_limit_need_no_place(store: JobStore) -> None:
    base = await submit_all(store, [envelope() for _ in range(2)])
    assert ids(await store.pull(POOL, 0, "w", places(0), KEEP)) == base
    jobs = await submit_all(store, [adapted(name) for name in "abcdef"])
    assert ids(await store.pull(POOL, 0, "w", budget(), KEEP)) == jobs


async def test_an_adapter_without_a_place_holds_up_its_own_bucket_alone(store: JobStore, client: Any) -> None:
    one, two = tenants_of_different_buckets(2)
    blocked = await submit_new(store, client, [adapted("b", tenant=one), envelope(tenant=one)])
    others = await submit_all(store, [envelope(tenant=two, job_class="batch"), adapted("a", tenant=two)])
    assert set(ids(await store.pull(POOL, 0, "w", places(0, "a"), KEEP))) == set(others)
    assert ids(await store.pull(POOL, 0, "x", places(0, "b"), KEEP)) == blocked


async def test_one_that_nobody_else_takes_is_let_in_one_in_each_pull(store: JobStore, client: Any) -> None:
    jobs = await submit_all(store, [adapted(name) for name in "bbcd"])
    for job_id in jobs:
        await age(client, job_id, 0.6)
    assert ids(await store.pull(POOL, 0, "w", places(0, "a"), KEEP)) == jobs[:2]
    assert ids(await store.pull(POOL, 0, "w", places(0, "a", "b"), KEEP)) == jobs[2:3]


async def test_an_idle_caller_gets_one_in_any_case(store: JobStore, client: Any) -> None:
    jobs = await submit_new(store, client, [adapted(name) for name in "ab"])
    room = replace(places(0), idle=True)
    assert ids(await store.pull(POOL, 0, "w", room, KEEP)) == jobs[:1]


async def test_what_another_worker_has_begun_goes_on_at_once(store: JobStore) -> None:
    jobs = await submit_all(store, [adapted(name) for name in "abcd"])
    taken = await store.pull(POOL, 0, "first", budget(), KEEP)
    for job in taken.jobs[:2]:
        assert await store.release("first", owned(job))
    again = await store.pull(POOL, 0, "second", places(0), NOW)
    assert sorted(ids(again)) == sorted(jobs)
