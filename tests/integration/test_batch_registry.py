"""Records of files and batches on a real server: races, expiry, and who is at a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from shared import keys
from shared.batch_record import BatchRecord, FileRecord, Progress, encode
from shared.batches import Batches, BatchesOverview, change_call, new_batch_id, new_file_id
from shared.connect import connect
from shared.errors import InvalidRequestError, NotFoundError
from shared.file_store import FileStore
from shared.task_queue import TaskQueue
from tasks.batch_keeper import MOST_DEATHS, BatchKeeper
from tasks.metrics import TasksMetrics


@pytest.fixture
async def batches(valkey_url: str) -> AsyncIterator[Batches]:
    client = connect(valkey_url)
    yield Batches(client)
    await client.aclose()


def a_batch(tenant: str = "t") -> BatchRecord:
    return BatchRecord(
        id=new_batch_id(), tenant=tenant, authenticated=True, endpoint="/v1/completions", input_file=new_file_id(),
        created_ms=1, expires_ms=2,
    )  # fmt: skip


async def test_changes_at_the_same_time_are_all_made(batches: Batches) -> None:
    record = a_batch()
    await batches.add_batch(record)

    def change(held: BatchRecord) -> BatchRecord:
        return replace(held, slices=held.slices + 1)

    await asyncio.gather(*(batches.change(record.id, change) for _ in range(20)))
    assert (await batches.batch(record.id)).slices == 20


async def test_only_one_is_at_a_batch(batches: Batches) -> None:
    record = a_batch()
    assert await batches.begin(record.id, "one") and not await batches.begin(record.id, "two")
    assert await batches.stay(record.id, "one") and not await batches.stay(record.id, "two")
    assert not await batches.advance(record.id, "two", Progress(next_line=5, completed=5), "part")
    assert await batches.progress(record.id) == Progress() and await batches.parts(record.id) == []
    await batches.count_death(record.id)
    assert await batches.advance(record.id, "one", Progress(next_line=5, completed=4, failed=1), "part")
    expected = Progress(next_line=5, completed=4, failed=1, seen_completed=4, seen_failed=1, deaths=0)
    assert await batches.progress(record.id) == expected and await batches.parts(record.id) == ["part"]
    await batches.leave(record.id, "two")
    assert await batches.is_running(record.id)
    await batches.leave(record.id, "one")
    assert not await batches.is_running(record.id)


async def test_what_is_said_twice_counts_once(batches: Batches) -> None:
    """The first answer may be lost on its way."""
    record = replace(a_batch(), status="in_progress", total=9)
    await batches.add_batch(record)
    await batches.begin(record.id, "one")
    progress = Progress(next_line=5, completed=4, failed=1)
    for _ in range(2):
        assert await batches.advance(record.id, "one", progress, "part", {"completed": 4, "failed": 1, "expired": 0})
    assert await batches.parts(record.id) == ["part"]
    assert (await batches.overview()).lines == {"completed": 4, "failed": 1}
    data = await batches._ask("GET", keys.batches(f"batch:{record.id}"))
    wanted = encode(replace(record, slices=1))
    call = change_call(record.id, data, wanted, 0, {"ended_completed": 1})
    assert [await batches._run(call) for _ in range(2)] == [1, 0]
    assert (await batches.overview()).ended == {"completed": 1}


async def test_an_overview_of_all_batches(batches: Batches) -> None:
    assert await batches.overview() == BatchesOverview()
    records = [replace(a_batch(), status=status, total=9) for status in ("validating", "in_progress", "in_progress")]
    for number, record in enumerate(records):
        await batches.add_batch(record)
        await batches.show(record.id, 0, 0, 10 * number)
    overview = await batches.overview()
    assert overview.open == {"validating": 1, "in_progress": 2} and overview.in_flight == 30
    change = {"completed": 3, "failed": 1, "ended_ms": 1}
    for _ in range(2):
        await batches.change(records[2].id, lambda held: replace(held, status="cancelled", **change), 60)
    await batches.close_batch(records[2].id)
    overview = await batches.overview()
    assert overview.open == {"validating": 1, "in_progress": 1} and overview.in_flight == 10
    assert overview.ended == {"cancelled": 1} and overview.lines == {"cancelled": 5}


def test_zeros_of_batches_before_anything_happens() -> None:
    registry = TasksMetrics().registry
    for state in ("validating", "in_progress", "finalizing", "cancelling"):
        assert registry.get_sample_value("ropeway_batches", {"state": state}) == 0
    for name in ("completed", "failed", "expired", "cancelled"):
        assert registry.get_sample_value("ropeway_batches_ended_total", {"status": name}) == 0
        assert registry.get_sample_value("ropeway_batch_lines_total", {"outcome": name}) == 0
    assert registry.get_sample_value("ropeway_batch_lines_in_flight") == 0


async def test_pages_pass_over_records_that_have_expired(batches: Batches) -> None:
    records = [replace(a_batch(), created_ms=i) for i in range(6)]
    for record in records:
        await batches.add_batch(record)
    await batches.add_batch(a_batch("another"))
    await batches._ask("DEL", keys.batches(f"batch:{records[4].id}"))
    page, more = await batches.batches("t", after=None, limit=2)
    assert [r.id for r in page] == [records[5].id, records[3].id] and more
    page, more = await batches.batches("t", after=page[-1].id, limit=3)
    assert [r.id for r in page] == [records[2].id, records[1].id, records[0].id] and not more
    with pytest.raises(InvalidRequestError, match="after"):
        await batches.batches("t", after=records[4].id, limit=2)


async def test_a_record_goes_when_its_batch_has_ended(batches: Batches) -> None:
    record = a_batch()
    await batches.add_batch(record)
    await batches.change(record.id, lambda held: replace(held, status="failed"), 0.001)
    async with asyncio.timeout(30):
        while True:
            try:
                await batches.batch(record.id)
            except NotFoundError:
                return
            await asyncio.sleep(0.01)


async def test_files_whose_time_is_over_are_deleted(batches: Batches, tmp_path: Path, valkey_url: str) -> None:
    store, now = FileStore(str(tmp_path)), await batches.clock_ms()
    old, young = (
        FileRecord(
            id=new_file_id(), tenant="t", filename="x", purpose="batch", bytes=1, created_ms=now, expires_ms=expires
        )
        for expires in (now, now + 60_000)
    )
    for record in (old, young):
        with store.create(record.id) as stream:
            stream.write(b"x")
        await batches.add_file(record)
    with pytest.raises(NotFoundError):  # at once, though its content is still there
        await batches.file(old.id, "t")
    await BatchKeeper(batches, store, TaskQueue(valkey_url, 60), 60).tidy()
    with pytest.raises(FileNotFoundError):
        store.open(old.id)
    found, _ = await batches.files("t", after=None, limit=10, ascending=True, purpose=None)
    assert [record.id for record in found] == [young.id]
    with store.open(young.id) as stream:
        assert stream.read() == b"x"


async def test_what_does_not_read_hides_and_holds_up_nothing(
    batches: Batches, tmp_path: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.batch_keeper._ABANDONED_S", 0.0)
    broken, good = sorted((a_batch(), a_batch()), key=lambda record: record.id)
    store, queue, now = FileStore(str(tmp_path)), TaskQueue(valkey_url, 60), await batches.clock_ms()
    files = [
        FileRecord(id=new_file_id(), tenant="t", filename="x", purpose="batch", bytes=1, created_ms=now, expires_ms=at)
        for at in (now - 1, now, now + 60_000, now + 60_000)
    ]
    for record in (broken, good):
        await batches.add_batch(record)
    for file in files:
        await batches.add_file(file)
    for name in (f"batch:{broken.id}", f"file:{files[0].id}", f"file:{files[2].id}"):
        await batches._ask("SET", keys.batches(name), b"\x80junk")
    overview = await batches.overview()
    assert overview.open == {"validating": 1}
    assert [record.id for record in (await batches.batches("t", after=None, limit=5))[0]] == [good.id]
    keeper = BatchKeeper(batches, store, queue, 60)
    await keeper.round()
    await keeper.round()
    assert await asyncio.to_thread(queue.batch_waits, good.id, 1)
    await keeper.tidy()
    queue.close()
    assert await batches.expired_files() == []
    page, _ = await batches.files("t", after=None, limit=5, ascending=True, purpose=None)
    assert [file.id for file in page] == [files[3].id]


async def test_a_batch_that_kills_whoever_is_at_it_is_given_up(
    batches: Batches, tmp_path: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.batch_keeper._ABANDONED_S", 0.0)
    record = a_batch()
    await batches.add_batch(record)
    for _ in range(MOST_DEATHS):
        await batches.count_death(record.id)
    queue = TaskQueue(valkey_url, 60)
    keeper = BatchKeeper(batches, FileStore(str(tmp_path)), queue, 60)
    await keeper.round()
    await keeper.round()
    queue.close()
    failed = await batches.batch(record.id)
    assert failed.status == "failed" and [fault.code for fault in failed.faults] == ["task_died"]
    assert await batches.open_batches() == []


async def test_a_batch_whose_slices_change_hands_is_not_abandoned(
    batches: Batches, tmp_path: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 2))  # seconds: each look is two later, an abandoned slice is one of three
    monkeypatch.setattr("tasks.batch_keeper.time", SimpleNamespace(monotonic=lambda: next(now)))
    record = a_batch()
    await batches.add_batch(record)
    queue = TaskQueue(valkey_url, 60)
    keeper = BatchKeeper(batches, FileStore(str(tmp_path)), queue, 60)
    for slices in range(1, 6):  # always looked at where nobody is at it for a moment, each time at another task's turn
        await keeper.round()
        assert (await batches.batch(record.id)).slices == slices - 1
        await batches.change(record.id, lambda held, slices=slices: replace(held, slices=slices))
    for _ in range(3):  # and now nobody comes
        await keeper.round()
    assert (await batches.batch(record.id)).slices == 6
    assert await asyncio.to_thread(queue.batch_waits, record.id, 6)
    queue.close()
