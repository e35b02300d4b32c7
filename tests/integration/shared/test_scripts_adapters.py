"""How many jobs pin an adapter's content: exact from submit to end, whatever becomes of them and of their keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared import keys
from shared.calls import AsyncClient
from shared.errors import ProtocolError
from shared.jobs import PulledJob
from shared.keys import JobId
from shared.upkeep import Upkeep
from tests.support.jobs import KEEP, NOW, POOL, budget, check_lane, envelope, last, owned

A, B = "a" * 32, "b" * 32


@pytest.fixture
def store(commands: AsyncClient) -> Upkeep:
    return Upkeep(commands)


async def pins(client: Any) -> dict[str, int]:
    counters = await client.hgetall(keys.stats(POOL, 0))
    return {name.decode()[2:]: int(value) for name, value in counters.items() if name.startswith(b"a:")}


async def test_queued_and_running_jobs_count_and_the_counter_goes_with_the_last(store: Upkeep, client: Any) -> None:
    jobs = [envelope(adapter_identity=identity) for identity in (A, A, B, None)]
    for job in jobs:
        await store.submit(job)
        await store.submit(job)
    assert await pins(client) == {A: 2, B: 1}
    held = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs
    assert await pins(client) == {A: 2, B: 1}
    await store.release("w", owned(held[0]))
    assert await pins(client) == {A: 2, B: 1}
    held = [*held[1:], *(await store.pull(POOL, 0, "w", budget(), KEEP)).jobs]
    left = {A: 2, B: 1}
    for job in held:
        await store.publish([last(job, "w", 1)])
        await store.publish([last(job, "w", 1)])
        if identity := job.envelope.adapter_identity:
            left[identity] -= 1
        assert await pins(client) == {name: count for name, count in left.items() if count}
    assert await pins(client) == {}


async def running(store: Upkeep, client: Any, job: PulledJob) -> None:
    await store.publish([last(job, "w", 1)])


async def cancelled(store: Upkeep, client: Any, job: PulledJob) -> None:
    await store.release("w", owned(job))
    assert await store.cancel(job.envelope.id) == "cancelled"


async def expired(store: Upkeep, client: Any, job: PulledJob) -> None:
    await client.hset(keys.job(JobId.parse(job.envelope.id)), "deadline_ms", 1)
    await store.sweep_lane(POOL, 0, 0.0)


async def expired_in_a_pull(store: Upkeep, client: Any, job: PulledJob) -> None:
    await client.hset(keys.job(JobId.parse(job.envelope.id)), "deadline_ms", 1)
    await store.pull(POOL, 0, "heir", budget(), NOW)


async def gone(store: Upkeep, client: Any, job: PulledJob) -> None:
    """The hash expires before anybody ends the job: its entry knows what it pinned."""
    await client.delete(keys.job(JobId.parse(job.envelope.id)))
    await store.sweep_lane(POOL, 0, 0.0)


async def gone_after_a_release(store: Upkeep, client: Any, job: PulledJob) -> None:
    await store.release("w", owned(job))
    await gone(store, client, job)


async def gone_after_being_put_back(store: Upkeep, client: Any, job: PulledJob) -> None:
    stream = (await client.hget(keys.job(JobId.parse(job.envelope.id)), "stream")).decode()
    await client.delete(f"{keys.lane_tag(POOL, 0)}:{stream}")
    assert await store.restore(job.envelope.id)
    assert await pins(client) == {A: 1, B: 1}
    await gone(store, client, job)


ENDS: list[Callable[[Upkeep, Any, PulledJob], Awaitable[None]]] = [
    running, cancelled, expired, expired_in_a_pull, gone, gone_after_a_release, gone_after_being_put_back,
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_every_end_counts_down_once(
    store: Upkeep, client: Any, end: Callable[[Upkeep, Any, PulledJob], Awaitable[None]]
) -> None:
    await store.submit(job := envelope(adapter_identity=A))
    (held,) = (await store.pull(POOL, 0, "w", budget(), KEEP)).jobs
    await store.submit(other := envelope(adapter_identity=B, job_class="batch", tenant="other"))
    await end(store, client, held)
    assert await pins(client) == {B: 1}
    there = [j.id for j in (job, other) if await client.exists(keys.job(JobId.parse(j.id)))]
    await check_lane(client, there)


@pytest.mark.parametrize("wrong", [{f"a:{A}": 5}, {f"a:{A}": -1, f"a:{B}": 1}, {f"a:{B}": "x"}])
async def test_counters_that_cannot_be_are_counted_anew(store: Upkeep, client: Any, wrong: dict[str, Any]) -> None:
    await store.submit(job := envelope(adapter_identity=A))
    await client.hset(keys.stats(POOL, 0), mapping=wrong)
    assert (await store.sweep_lane(POOL, 0, 0.0)).recounted
    assert await pins(client) == {A: 1}
    await check_lane(client, [job.id])
    assert not (await store.sweep_lane(POOL, 0, 0.0)).recounted


async def test_a_job_that_is_submitted_again_after_its_burial_pins_again(store: Upkeep, client: Any) -> None:
    await store.submit(envelope(adapter_identity=A))
    for number in range(9):
        await store.pull(POOL, 0, f"w{number}", budget(idle=True), NOW)
        if letters := await store.dead_letters(POOL, 0):
            break
    assert letters and await pins(client) == {}
    await store.retry_dead(letters[0].job_id)
    assert await pins(client) == {A: 1}


@pytest.mark.parametrize("identity", ["", "A" * 32, "a" * 31, f"{'a' * 32}\n", "../etc"])
async def test_an_identity_that_is_none_is_not_queued(store: Upkeep, identity: str) -> None:
    with pytest.raises(ProtocolError, match="32 hexadecimal"):
        await store.submit(envelope(adapter_identity=identity))
