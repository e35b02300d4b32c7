"""The registry of adapters on real servers: names change as a whole, whoever else is at it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shared import keys
from shared.adapter_record import AdapterRecord, Content, PendingLoad, encode_record
from shared.adapters import AdapterLoadedError, Adapters
from shared.calls import AsyncClient
from shared.connect import connect_pubsub
from shared.errors import ConflictError, OverloadedError, ProtocolError, VersionError
from shared.jobstore import JobStore
from tests.support.jobs import POOL, envelope

pytestmark = pytest.mark.topologies
A, B = "a" * 32, "b" * 32


def content(identity: str = A) -> Content:
    return Content(identity=identity, rank=8, bytes=1000)


def load(source: str = "/a", **more: Any) -> PendingLoad:
    return PendingLoad(version=0, source=source, since_ms=5, **more)


def unstamped(record: AdapterRecord) -> AdapterRecord:
    return msgspec.structs.replace(record, stamp="")


@pytest.fixture
def adapters(commands: AsyncClient) -> Adapters:
    return Adapters(commands)


async def loaded(adapters: Adapters, name: str = "x", identity: str = A, **more: Any) -> AdapterRecord:
    """A name that stands for a content."""
    record, *_ = await adapters.begin(name, POOL, load(identity, **more), replace=True)
    assert record.pending is not None
    assert await adapters.finish(name, record.pending.version, content(identity), 9)
    held = await adapters.find(name)
    assert held is not None
    return held


async def test_from_the_first_load_to_the_end(adapters: Adapters) -> None:
    assert await adapters.find("x") is None and await adapters.revision() == 0
    record, began, _ = await adapters.begin("x", POOL, load(pinned=True), replace=False)
    assert began and record.content is None
    assert record.pending == PendingLoad(version=1, source="/a", pinned=True, since_ms=5)
    assert await adapters.finish("x", 1, content(), 9)
    held = await adapters.find("x")
    assert held is not None and unstamped(held) == AdapterRecord(
        name="x", pool=POOL, version=1, content=content(), source="/a", pinned=True, created_ms=5, loaded_ms=9,
        next_version=2,
    )  # fmt: skip
    assert await adapters.records() == [held] == await adapters.records(POOL)
    assert await adapters.records("other") == [] == await adapters.drained()
    assert await adapters.remove("x") == held
    assert await adapters.remove("x") is None and await adapters.find("x") is None
    assert await adapters.drained(POOL) == [held]
    await adapters.forget_drained(held)
    assert await adapters.drained() == []
    assert await adapters.revision() == 3


async def test_a_name_in_use_is_replaced_only_on_request(adapters: Adapters) -> None:
    await loaded(adapters)
    with pytest.raises(AdapterLoadedError, match="already been loaded"):
        await adapters.begin("x", POOL, load("/b"), replace=False)
    record, began, _ = await adapters.begin("x", POOL, load("/b"), replace=True)
    assert began and record.identity == A, "what it stands for goes on serving"
    assert await adapters.finish("x", 2, content(B), 10)
    held = await adapters.find("x")
    assert held is not None and (held.identity, held.version, held.source) == (B, 2, "/b")


async def test_a_reload_that_fails_keeps_what_was_there_and_says_why(adapters: Adapters) -> None:
    before = await loaded(adapters)
    await adapters.begin("x", POOL, load("/b"), replace=True)
    assert await adapters.fail("x", 2, "broken")
    held = await adapters.find("x")
    assert held is not None
    assert unstamped(held) == unstamped(msgspec.structs.replace(before, error="broken", next_version=3))
    after = await loaded(adapters)
    assert after.error is None and after.version == 3


async def test_who_takes_the_place_of_a_load_is_told_of_it(adapters: Adapters) -> None:
    assert (await adapters.begin("x", POOL, load("/a"), replace=True)).overtaken is None
    assert (await adapters.begin("x", POOL, load("/a"), replace=True)).overtaken is None
    overtaken = (await adapters.begin("x", POOL, load("/b"), replace=True)).overtaken
    assert overtaken is not None and (overtaken.source, overtaken.version) == ("/a", 1)
    assert await adapters.fail("x", 2, "broken")
    assert (await adapters.begin("x", POOL, load("/c"), replace=True)).overtaken is None


async def test_an_error_as_long_as_a_file_is_cut(adapters: Adapters) -> None:
    await adapters.begin("x", POOL, load(), replace=False)
    assert await adapters.fail("x", 1, "é" * 300_000)
    held = await adapters.find("x")
    assert held is not None and held.pending is None and held.error == "é" * 1000


async def test_a_load_that_was_overtaken_changes_nothing(adapters: Adapters) -> None:
    await adapters.begin("x", POOL, load("/a"), replace=False)
    with pytest.raises(ConflictError, match="under way"):
        await adapters.begin("x", POOL, load("/b"), replace=False)
    await adapters.begin("x", POOL, load("/b"), replace=True)
    assert not await adapters.finish("x", 1, content(A), 9)
    assert not await adapters.fail("x", 1, "broken")
    assert await adapters.restart("x", 1, 6) is None
    assert await adapters.finish("x", 2, content(B), 9)
    assert await adapters.finish("x", 2, content(B), 9), "the answer was lost"
    held = await adapters.find("x")
    assert held is not None and held.identity == B
    await adapters.begin("x", POOL, load("/c"), replace=True)
    await adapters.remove("x")
    assert not await adapters.finish("x", 3, content(A), 9) and await adapters.find("x") is None


async def test_one_flight_for_many_who_ask_for_the_same(adapters: Adapters) -> None:
    answers = await asyncio.gather(*(adapters.begin("x", POOL, load("/a"), replace=True) for _ in range(50)))
    assert sum(answer.began for answer in answers) == 1
    assert {record.pending.version for record, *_ in answers if record.pending} == {1}
    pending = await adapters.restart("x", 1, 77)
    assert pending is not None and (pending.starts, pending.since_ms) == (1, 77)


async def test_many_at_once_lose_nothing(adapters: Adapters) -> None:
    """Each change is of what the one before has left."""
    await asyncio.gather(*(adapters.begin("x", POOL, load(f"/{n}"), replace=True) for n in range(20)))
    held = await adapters.find("x")
    assert held is not None and held.next_version == 21 and held.pending is not None
    assert await adapters.revision() == 20


async def test_a_name_belongs_to_one_pool(adapters: Adapters) -> None:
    await loaded(adapters)
    with pytest.raises(ConflictError, match=f"belongs to the base model {POOL}"):
        await adapters.begin("x", "other", load(), replace=True)
    await adapters.remove("x")
    record, *_ = await adapters.begin("x", "other", load(), replace=True)
    assert record.pool == "other"
    await adapters.fail("x", 1, "broken")
    record, *_ = await adapters.begin("x", POOL, load(), replace=False)
    assert record.pool == POOL, "a name that never stood for anything is free"


async def test_there_are_so_many_names_and_no_more(adapters: Adapters) -> None:
    for name in ("x", "y"):
        await adapters.begin(name, POOL, load(), replace=False, most=2)
    with pytest.raises(OverloadedError, match="2 adapters are registered"):
        await adapters.begin("z", POOL, load(), replace=False, most=2)
    await adapters.begin("x", POOL, load("/b"), replace=True, most=2)
    assert len(await adapters.records()) == 2


async def test_names_that_look_alike_are_different(adapters: Adapters) -> None:
    names = ["a/b", "a-b", "a.b", "A/b", "a_b", "a@1"]
    for name, identity in zip(names, "012345", strict=True):
        await loaded(adapters, name, identity * 32)
    held = [await adapters.find(name) for name in names]
    assert [record.identity[0] for record in held if record and record.identity] == list("012345")
    for name in names:
        await adapters.remove(name)
    assert sorted(record.name for record in await adapters.drained()) == sorted(names)


async def test_jobs_in_flight_are_counted_over_all_lanes(adapters: Adapters, commands: AsyncClient) -> None:
    store = JobStore(commands)
    for lane, identity in ((0, A), (1, A), (1, B), (2, None)):
        await store.submit(envelope(lane=lane, adapter_identity=identity))
    assert await adapters.in_flight(POOL, 3) == {A: 2, B: 1}


async def test_contents_without_a_name_are_deleted_once_nobody_wants_them(adapters: Adapters) -> None:
    await loaded(adapters, "x", A)
    await loaded(adapters, "y", A)
    assert await adapters.unused(2**53) == {}
    await adapters.remove("x")
    now = await adapters.clock_ms()
    (since,) = (await adapters.unused(now)).values()
    assert now - 60_000 < since <= now and await adapters.unused(since - 1) == {}
    await adapters.is_used(A, since)
    assert await adapters.unused(now) == {}
    await adapters.remove("y")
    ((identity, since),) = (await adapters.unused(2**53)).items()
    assert identity == A and await adapters.may_delete(A, since)
    assert not await adapters.keep(A), "it must not be relied on while it is being deleted"
    await adapters.deleted(A, since)
    assert await adapters.keep(A)
    assert list(await adapters.unused(2**53)) == [A], "unless a name gets it, it is deleted again"


async def test_a_content_that_is_wanted_again_is_not_deleted(adapters: Adapters) -> None:
    await loaded(adapters, "x", A)
    await adapters.remove("x")
    ((_, since),) = (await adapters.unused(2**53)).items()
    await loaded(adapters, "y", A)
    assert not await adapters.may_delete(A, since)
    await asyncio.sleep(0.005)  # that the clock moves on
    await adapters.remove("y")
    assert not await adapters.may_delete(A, since), "it was in use since then"


async def test_a_change_is_told_to_the_pool_s_workers(adapters: Adapters, redis_url: str) -> None:
    listener = connect_pubsub(redis_url)
    try:
        pubsub = listener.pubsub()
        await pubsub.subscribe(keys.control(POOL))
        while not await pubsub.get_message(timeout=1):
            pass
        await loaded(adapters)
        while not (message := await pubsub.get_message(timeout=1)):
            pass
        assert msgspec.msgpack.decode(message["data"]) == {"op": "adapters"}
        await pubsub.aclose()
    finally:
        await listener.aclose()


async def test_a_record_that_does_not_read_hides_no_other_and_can_be_replaced(adapters: Adapters, client: Any) -> None:
    await loaded(adapters, "good")
    await client.hset(keys.adapters("names"), "bad", b"\xc1")
    newer = encode_record(AdapterRecord(v=2, name="new", pool=POOL))
    await client.hset(keys.adapters("names"), "new", newer)
    assert [record.name for record in await adapters.records()] == ["good"]
    with pytest.raises(ProtocolError):
        await adapters.find("bad")
    with pytest.raises(VersionError):
        await adapters.begin("new", POOL, load(), replace=True)
    assert (await loaded(adapters, "bad", B)).identity == B


async def test_a_record_that_does_not_read_can_be_unloaded(adapters: Adapters, client: Any) -> None:
    """And what of it does read is not lost: its content drains, and is deleted from the store one day."""
    names = keys.adapters("names")
    newer = encode_record(AdapterRecord(v=2, name="newer", pool=POOL, version=3, content=content(B)))
    strange = msgspec.msgpack.encode({"pool": POOL, "content": {"identity": A}, "version": "three"})
    foreign = msgspec.msgpack.encode({"pool": "../..", "content": {"identity": "../../etc"}})
    records = {"bytes": b"\xc1", "text": b"hello", "newer": newer, "strange": strange, "foreign": foreign}
    for name, data in records.items():
        await client.hset(names, name, data)
        removed = await adapters.remove(name)
        assert removed is not None and removed.name == name
        assert removed.pool == (POOL if name in ("newer", "strange") else "")
        assert await adapters.find(name) is None and await adapters.remove(name) is None
    assert [(record.name, record.identity) for record in await adapters.drained()] == [("newer", B), ("strange", A)]
    assert (await adapters.unused(await adapters.clock_ms())).keys() == {A, B}
