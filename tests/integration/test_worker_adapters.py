"""A worker with adapters: whatever happens to worker, names, store or slots, a job gets its own adapter's text."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared import keys
from shared.jobs import Lifetime
from shared.protocol import AdapterTargets, Card, Envelope, WorkerInfo, decode
from tests.support.stored_adapters import put_adapter
from tests.support.worker_harness import (
    LANES,
    PATIENCE_S,
    POOL,
    Follower,
    Harness,
    WorkerProcess,
    expected,
    harness,
    job,
)


def lora(store: Path, **settings: object) -> dict[str, Any]:
    """Settings of a worker with adapters."""
    return {"enable_lora": True, "adapter_store": store, "max_loras": 2, **settings}


async def entry(h: Harness, worker: WorkerProcess, condition: Callable[[WorkerInfo], bool]) -> WorkerInfo:
    """The worker's entry in the registry, once it is as it should be."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            data = await h.client.hget(keys.worker(POOL, worker.owner), "info")
            if data is not None and condition(info := decode(data, WorkerInfo)):
                return info
            await asyncio.sleep(0.05)


async def completed(h: Harness, envelope: Envelope, follower: Follower) -> None:
    """The job's answer is that of its adapter alone."""
    frames = await follower.end()
    assert frames[-1].status == "completed", frames[-1].error
    assert (await h.result(envelope.id)).choices == expected(envelope)


async def test_many_adapters_through_few_slots(valkey_url: str, tmp_path: Path) -> None:
    identities = [put_adapter(tmp_path, seed) for seed in range(8)]
    jobs = [job(n, lane=n % LANES, adapter=[*identities, None][n % 9], max_tokens=12) for n in range(27)]
    texts = Counter(expected(envelope)[0].text for envelope in jobs)
    assert len(texts) == len(jobs)
    async with harness(valkey_url) as h:
        for number, identity in enumerate(identities):
            await h.name_adapter(f"adapter-{number}", identity)
        worker = await h.worker(**lora(tmp_path, sim_step_ms=2, sim_adapter_load_ms=5))
        followers = [await h.submit(envelope) for envelope in jobs]
        for envelope, follower in zip(jobs, followers, strict=True):
            await completed(h, envelope, follower)
        info = await entry(h, worker, lambda info: info.running == 0 and len(info.adapters_in_memory) == 8)
        assert info.max_loras == 2
        assert len(info.adapters) == 2
        assert set(info.adapters_in_memory) == set(identities)


async def test_what_a_pool_says_of_its_adapters(valkey_url: str, tmp_path: Path) -> None:
    async with harness(valkey_url) as h:
        await h.worker(**lora(tmp_path, max_lora_rank=8))
        card = decode(await h.client.hget(keys.card(POOL), "card"), Card)
        assert card.max_lora_rank == 8
        targets = decode(await h.client.get(keys.adapter_targets(POOL)), AdapterTargets)
        assert targets.max_lora_rank == 8
        assert targets.modules["model.layers.0.self_attn.q_proj"] == (8, 8)
        other = await h.worker(ready=False, **lora(tmp_path, max_lora_rank=16))
        await other.event("this worker does not fit into the pool")
        assert await other.wait() == 78


async def test_a_first_request_of_fifty_reads_once(valkey_url: str, tmp_path: Path) -> None:
    identity = put_adapter(tmp_path, 1)
    async with harness(valkey_url) as h:
        await h.name_adapter("sql", identity)
        worker = await h.worker(**lora(tmp_path, sim_adapter_load_ms=300, max_num_seqs=64))
        jobs = [job(n, lane=n % LANES, adapter=identity, max_tokens=5) for n in range(50)]
        followers = [await h.submit(envelope) for envelope in jobs]
        for envelope, follower in zip(jobs, followers, strict=True):
            await completed(h, envelope, follower)
        loads = [line for line in worker.lines if "is in memory after" in str(line["event"])]
        assert len(loads) == 1


async def test_an_adapter_that_is_not_in_the_store_fails_its_jobs_alone(valkey_url: str, tmp_path: Path) -> None:
    good = put_adapter(tmp_path, 1)
    async with harness(valkey_url) as h:
        await h.worker(**lora(tmp_path))
        lost, fine, base = job(1, adapter="0" * 32), job(2, adapter=good), job(3)
        followers = [await h.submit(envelope) for envelope in (lost, fine, base)]
        for envelope, follower in zip((fine, base), followers[1:], strict=True):
            await completed(h, envelope, follower)
        frames = await followers[0].end()
        assert frames[-1].status == "failed"
        assert frames[-1].error is not None
        assert (frames[-1].error.status, frames[-1].error.code) == (503, "adapter_store_unavailable")


async def test_a_pinned_one_is_in_memory_of_every_worker_before_any_request(valkey_url: str, tmp_path: Path) -> None:
    identities = [put_adapter(tmp_path, seed) for seed in range(4)]
    pinned = identities[0]
    async with harness(valkey_url) as h:
        first = await h.worker(**lora(tmp_path, max_loras=1, max_cpu_loras=2, heartbeat_s=0.2))
        await h.name_adapter("sql", pinned, pinned=True)
        await entry(h, first, lambda info: info.adapters_in_memory == [pinned])
        second = await h.worker(**lora(tmp_path, max_loras=1, max_cpu_loras=2))
        await entry(h, second, lambda info: info.adapters_in_memory == [pinned])
        for number, identity in enumerate(identities[1:], 1):
            await h.name_adapter(f"other-{number}", identity)
            envelope = job(number, lane=number, adapter=identity, max_tokens=5)
            await completed(h, envelope, await h.submit(envelope))
        for worker in (first, second):
            info = await entry(h, worker, lambda info: info.running == 0)
            assert pinned in info.adapters_in_memory
        loads = [line for line in first.lines if "is in memory after" in str(line["event"])]
        assert sum(pinned in line["event"] for line in loads) == 1


async def test_reload_and_unload_leave_running_jobs_alone_and_then_free_slot_and_memory(
    valkey_url: str, tmp_path: Path
) -> None:
    old, new = put_adapter(tmp_path, 1), put_adapter(tmp_path, 2)
    async with harness(valkey_url) as h:
        await h.name_adapter("sql", old)
        worker = await h.worker(**lora(tmp_path, max_loras=2))
        before = job(1, adapter=old, max_tokens=80)
        follower = await h.submit(before)
        await follower.tokens(5)
        await h.name_adapter("sql", new)
        after = job(1, adapter=new, max_tokens=80)
        later = await h.submit(after)
        await later.tokens(5)
        info = await entry(h, worker, lambda info: set(info.adapters) == {old, new})
        assert set(info.adapters_in_memory) == {old, new}, "the old one runs"
        await completed(h, before, follower)
        await entry(h, worker, lambda info: info.adapters == info.adapters_in_memory == [new])
        await h.unname_adapter("sql")
        await completed(h, after, later)
        assert expected(before) != expected(after)
        await entry(h, worker, lambda info: not info.adapters and not info.adapters_in_memory)


async def test_trailing_jobs_of_an_old_content_read_it_once(valkey_url: str, tmp_path: Path) -> None:
    """They run one after the other, and whenever one ends nobody here wants the content for a moment."""
    old, new = put_adapter(tmp_path, 1), put_adapter(tmp_path, 2)
    async with harness(valkey_url) as h:
        await h.name_adapter("sql", old)
        worker = await h.worker(**lora(tmp_path, max_num_seqs=1, heartbeat_s=0.1))
        jobs = [job(n, adapter=old, max_tokens=30, n=1) for n in range(5)]
        followers = [await h.submit(envelope) for envelope in jobs]
        await followers[0].tokens(1)
        await h.name_adapter("sql", new)
        for envelope, follower in zip(jobs, followers, strict=True):
            await completed(h, envelope, follower)
        await entry(h, worker, lambda info: not info.adapters and not info.adapters_in_memory)
        loads = [line for line in worker.lines if "is in memory after" in str(line["event"])]
        assert len(loads) == 1


async def test_a_worker_that_serves_no_adapters_says_so(valkey_url: str, tmp_path: Path) -> None:
    async with harness(valkey_url) as h:
        await h.worker()
        envelope = job(1, adapter="a" * 32)
        follower = await h.submit(envelope)
        frames = await follower.end()
        assert frames[-1].error is not None
        assert (frames[-1].error.status, frames[-1].error.param) == (400, "adapter")
        assert "enable_lora" in frames[-1].error.message


async def test_a_store_that_lags_is_waited_for(valkey_url: str, tmp_path: Path) -> None:
    identity = put_adapter(tmp_path / "elsewhere", 1)
    async with harness(valkey_url) as h:
        worker = await h.worker(**lora(tmp_path / "store"))
        envelope = job(1, adapter=identity, max_tokens=5)
        follower = await h.submit(envelope)
        await entry(h, worker, lambda info: info.adapters_loading == [identity])
        shutil.copytree(tmp_path / "elsewhere" / identity, tmp_path / "store" / identity)
        await completed(h, envelope, follower)


async def test_a_damaged_adapter_fails_and_its_repair_is_taken(valkey_url: str, tmp_path: Path) -> None:
    identity, other = put_adapter(tmp_path, 1), put_adapter(tmp_path, 2)
    good = (tmp_path / identity / "adapter_model.safetensors").read_bytes()
    (tmp_path / identity / "adapter_model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    async with harness(valkey_url) as h:
        await h.name_adapter("broken", identity)
        worker = await h.worker(**lora(tmp_path))
        before = await h.store.now_ms(POOL) - 1000
        broken, fine = job(1, adapter=identity), job(2, adapter=other)
        followers = [await h.submit(envelope) for envelope in (broken, fine)]
        frames = await followers[0].end()
        assert (frames[-1].status, frames[-1].error and frames[-1].error.code) == ("failed", "invalid_adapter")
        await completed(h, fine, followers[1])
        info = await entry(h, worker, lambda info: bool(info.adapters_failed))
        assert "changed" in info.adapters_failed[identity]
        assert before <= info.adapters_failed_ms[identity] <= await h.store.now_ms(POOL) + 1000
        warned = await worker.event(
            f"adapter name-of-{identity[:4]} ({identity}) cannot be served: the adapter's files were changed after it "
            "was registered"
        )
        assert warned["level"] == "warning"
        (tmp_path / identity / "adapter_model.safetensors").write_bytes(good)
        again = job(3, adapter=identity)
        await completed(h, again, await h.submit(again))
        await entry(h, worker, lambda info: not info.adapters_failed)


async def test_an_object_store_is_read_through_copies_that_mend_and_go(valkey_url: str, tmp_path: Path) -> None:
    identities = [put_adapter(tmp_path / "bucket", seed) for seed in range(2)]
    copies = tmp_path / "cache" / "adapter-copies"
    async with harness(valkey_url) as h:
        for number, identity in enumerate(identities):
            await h.name_adapter(f"adapter-{number}", identity)
        bucket = f"local://{tmp_path}/bucket"
        first = await h.worker(**lora(tmp_path) | {"adapter_store": bucket, "cache_dir": tmp_path / "cache"})
        for number, identity in enumerate(identities):
            envelope = job(number, lane=number, adapter=identity)
            await completed(h, envelope, await h.submit(envelope))
            assert (copies / identity / "adapter_model.safetensors").is_file()
        await first.stop()
        copy = copies / identities[0] / "adapter_model.safetensors"
        copy.write_bytes(copy.read_bytes()[:-1] + b"!")
        second = await h.worker(**lora(tmp_path) | {"adapter_store": bucket, "cache_dir": tmp_path / "cache"})
        envelope = job(5, adapter=identities[0])
        await completed(h, envelope, await h.submit(envelope))
        await h.unname_adapter("adapter-0")
        await entry(h, second, lambda info: not info.adapters_in_memory)
        async with asyncio.timeout(PATIENCE_S):
            while (copies / identities[0]).exists():
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("state", ["running", "waiting", "loading"])
async def test_a_killed_workers_jobs_go_on_with_the_same_content(valkey_url: str, tmp_path: Path, state: str) -> None:
    first_id, second_id = put_adapter(tmp_path, 1), put_adapter(tmp_path, 2)
    async with harness(valkey_url) as h:
        settings = lora(tmp_path, max_loras=1, sim_adapter_load_ms=1000 if state == "loading" else 0)
        first = await h.worker(**settings)
        occupant = job(1, adapter=second_id, max_tokens=60, n=1)
        envelope = job(2, lane=1, adapter=first_id, max_tokens=60, n=2, logprobs=1)
        followers = {}
        if state == "waiting":
            followers[occupant.id] = await h.submit(occupant)
            await followers[occupant.id].tokens(2)
        followers[envelope.id] = await h.submit(envelope)
        if state == "running":
            await followers[envelope.id].tokens(10)
        elif state == "waiting":
            await entry(h, first, lambda info: first_id in info.adapters_in_memory)
        else:
            await entry(h, first, lambda info: first_id in info.adapters_loading)
        first.signal(signal.SIGKILL)
        await h.worker(**settings)
        await completed(h, envelope, followers[envelope.id])
        if state == "waiting":
            await completed(h, occupant, followers[occupant.id])


async def test_a_drain_hands_jobs_of_adapters_over(valkey_url: str, tmp_path: Path) -> None:
    identities = [put_adapter(tmp_path, seed) for seed in range(4)]
    async with harness(valkey_url) as h:
        first = await h.worker(**lora(tmp_path, max_loras=2, grace_s=0))
        jobs = [job(n, lane=n, adapter=identity, max_tokens=60) for n, identity in enumerate(identities)]
        followers = [await h.submit(envelope) for envelope in jobs]
        await followers[0].tokens(3)
        second = await h.worker(**lora(tmp_path, max_loras=2))
        first.signal(signal.SIGTERM)
        assert await first.wait() == 0
        for envelope, follower in zip(jobs, followers, strict=True):
            await completed(h, envelope, follower)
        assert second.alive


async def test_a_worker_whose_store_is_away_still_ends_when_told_to(valkey_url: str, tmp_path: Path) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(**lora(tmp_path, grace_s=0))
        envelope = job(1, adapter="0" * 32)
        await h.submit(envelope)
        await entry(h, worker, lambda info: bool(info.adapters_loading))
        worker.signal(signal.SIGTERM)
        assert await worker.wait() == 0


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_job_that_ends_early_in_any_state_leaves_nothing(valkey_url: str, tmp_path: Path, how: str) -> None:
    identities = [put_adapter(tmp_path, seed) for seed in range(2)]
    async with harness(valkey_url) as h:
        worker = await h.worker(**lora(tmp_path, max_loras=1))
        running = job(1, adapter=identities[0], max_tokens=2000)
        waiting = job(2, lane=1, adapter=identities[1], max_tokens=2000)
        loading = job(3, lane=2, adapter="0" * 32, max_tokens=2000)
        lifetime = Lifetime(deadline_s=6.0 if how == "expired" else 600.0)
        followers = [await h.follow(envelope.id) for envelope in (running, waiting, loading)]
        await h.store.submit(running, lifetime=lifetime)
        await followers[0].tokens(2)
        for envelope in (waiting, loading):
            await h.store.submit(envelope, lifetime=lifetime)
        await entry(h, worker, lambda info: len(info.adapters_in_memory) == 2 and info.adapters_loading == ["0" * 32])
        if how == "cancelled":
            for envelope in (loading, waiting, running):
                await h.store.cancel(envelope.id)
        for follower in followers:
            assert (await follower.end())[-1].status == how
        # The worker checks its engine when it is idle; no name stands for these adapters, so nothing is kept.
        await entry(h, worker, lambda info: not info.adapters and not info.adapters_in_memory and info.running == 0)
        assert worker.alive


async def test_one_worker_does_not_take_the_jobs_of_all_adapters_while_another_idles(
    valkey_url: str, tmp_path: Path
) -> None:
    identities = [put_adapter(tmp_path, seed) for seed in range(12)]
    async with harness(valkey_url) as h:
        workers = [await h.worker(**lora(tmp_path, max_loras=2)) for _ in range(2)]
        await asyncio.gather(*(entry(h, worker, lambda info: info.max_loras == 2) for worker in workers))
        # One lane has one home.
        jobs = [job(n, adapter=identity, max_tokens=300) for n, identity in enumerate(identities)]
        followers = []
        for envelope in jobs:
            followers.append(await h.submit(envelope))
            # However slow this machine is, it has not waited so long that it is taken without a place.
            await h.client.hincrby(keys.job(keys.JobId.parse(envelope.id)), "submitted_us", 600 * 10**6)
        held = {worker.owner: 0 for worker in workers}
        async with asyncio.timeout(PATIENCE_S):
            while min(held.values()) < 4:
                owners = [await h.client.hget(keys.job(keys.JobId.parse(e.id)), "owner") for e in jobs]
                held = {worker.owner: owners.count(worker.owner.encode()) for worker in workers}
                await asyncio.sleep(0.02)
        for follower in followers:  # nor does one that found no place wait for ever
            await follower.tokens(1)
