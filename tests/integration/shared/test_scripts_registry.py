"""Card, tokenizer and workers: what a pool agrees on, and who lives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import keys
from shared.errors import ConflictError, JobNotFoundError, VersionError
from shared.jobs import LaneLoad
from shared.jobstore import JobStore
from shared.protocol import Card, TokenizerBundle, WorkerInfo
from tests.support.jobs import KEEP, POOL, budget, envelope, last

pytestmark = pytest.mark.topologies
BUNDLE = TokenizerBundle(tokenizer_json="{}", chat_template="t", special_tokens={"eos_token": "</s>"})


def card(**fields: Any) -> Card:
    base: dict[str, Any] = {
        "pool": POOL, "digest": "d", "lanes": 4, "max_model_len": 100, "vocab_size": 10, "eos_token_ids": [1],
        "kv_tokens": 1000,
    }  # fmt: skip
    return Card(**(base | fields))


async def test_a_pool_that_is_not_there(store: JobStore) -> None:
    assert await store.get_card(POOL) is None and await store.get_bundle(POOL) is None
    assert await store.pools() == [] and await store.live_workers(POOL, 1000) == []


async def test_the_first_writer_wins(store: JobStore) -> None:
    first, second = card(kv_tokens=1), card(kv_tokens=2)
    assert await store.put_card(first, BUNDLE) == first
    assert await store.put_card(second, TokenizerBundle(tokenizer_json="other")) == first
    assert await store.get_card(POOL) == first and await store.get_bundle(POOL) == BUNDLE
    assert await store.pools() == [POOL]


async def test_many_first_writers_agree(store: JobStore) -> None:
    held = await asyncio.gather(*(store.put_card(card(kv_tokens=i), BUNDLE) for i in range(10)))
    assert all(answer == held[0] for answer in held)


@pytest.mark.parametrize("field", [{"digest": "x"}, {"lanes": 8}, {"max_model_len": 99}, {"vocab_size": 11}])
async def test_another_card_is_refused_while_a_worker_lives(store: JobStore, field: dict[str, Any]) -> None:
    await store.put_card(card(), BUNDLE)
    await store.heartbeat(POOL, WorkerInfo(owner="o"), 60_000)
    with pytest.raises(ConflictError) as caught:
        await store.put_card(card(**field), BUNDLE)
    assert caught.value.status == 409 and POOL in caught.value.message
    assert await store.get_card(POOL) == card()
    await store.leave(POOL, "o")
    assert await store.put_card(card(**field), BUNDLE) == card(**field)


async def test_another_card_is_refused_while_jobs_wait_or_run(store: JobStore) -> None:
    await store.put_card(card(), BUNDLE)
    await store.submit(envelope(lane=3))
    with pytest.raises(ConflictError):
        await store.put_card(card(digest="x"), BUNDLE)
    job = (await store.pull(POOL, 3, "w", budget(), KEEP)).jobs[0]
    with pytest.raises(ConflictError):
        await store.put_card(card(digest="x"), BUNDLE)
    await store.publish([last(job, "w", 1)])
    assert (await store.put_card(card(digest="x"), BUNDLE)).digest == "x"


async def test_a_card_of_another_version(store: JobStore, client: Any) -> None:
    await store.put_card(card(), BUNDLE)
    await client.hset(keys.card(POOL), mapping={"agreement": "99:x", "card": b"\x81\xa1v\x63"})
    with pytest.raises(VersionError):
        await store.get_card(POOL)
    assert await store.put_card(card(), BUNDLE) == card()


async def test_a_lost_tokenizer_comes_back_with_the_next_worker(store: JobStore, client: Any) -> None:
    await store.put_card(card(), BUNDLE)
    await client.delete(keys.tokenizer(POOL))
    await store.put_card(card(), BUNDLE)
    assert await store.get_bundle(POOL) == BUNDLE


async def test_workers_come_and_go(store: JobStore, client: Any) -> None:
    infos = [WorkerInfo(owner=name, running=i) for i, name in enumerate(("b", "a", "c"))]
    answers = [await store.heartbeat(POOL, info, 60_000) for info in infos]
    assert answers == [["b"], ["a", "b"], ["a", "b", "c"]]
    assert await store.live_workers(POOL, 60_000) == sorted(infos, key=lambda info: info.owner)
    again = WorkerInfo(owner="b", state="draining")
    await store.heartbeat(POOL, again, 60_000)
    assert again in await store.live_workers(POOL, 60_000)
    await store.leave(POOL, "b")
    assert [info.owner for info in await store.live_workers(POOL, 60_000)] == ["a", "c"]
    for name in (keys.worker(POOL, "a"), keys.workers(POOL)):
        assert await client.pttl(name) > 0


async def test_a_silent_worker_is_dropped_by_the_next_heartbeat(store: JobStore, client: Any) -> None:
    await store.heartbeat(POOL, WorkerInfo(owner="silent"), 60_000)
    await client.zadd(keys.workers(POOL), {"silent": await store.now_ms() - 60_001})
    assert await store.live_workers(POOL, 60_000) == []
    assert await store.heartbeat(POOL, WorkerInfo(owner="alive"), 60_000) == ["alive"]
    assert await client.zrange(keys.workers(POOL), 0, -1) == [b"alive"]


async def test_load_is_summed_over_lanes(store: JobStore) -> None:
    for lane in (0, 1, 1):
        await store.submit(envelope(lane=lane))
    await store.pull(POOL, 1, "w", budget(sequences=1), KEEP)
    assert await store.lane_load(POOL, 1) == LaneLoad(1, 10, 1, 10)
    assert await store.pool_load(POOL, 4) == LaneLoad(2, 20, 1, 10)
    assert await store.pool_load("nobody", 16) == LaneLoad()


@pytest.mark.parametrize("job_id", ["", "nonsense", f"pool.0.{'0' * 32}"])
async def test_an_unknown_job_is_not_found(store: JobStore, job_id: str) -> None:
    for call in (store.get, store.status):
        with pytest.raises(JobNotFoundError):
            await call(job_id)


async def test_a_log_that_is_not_there_is_empty(store: JobStore) -> None:
    assert await store.read_log(envelope().id) == []
