"""The store with patience, and what the engine is told of the pool's adapters."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.request import AdapterStats, EngineStats
from shared.adapter_record import AdapterRecord, Content
from shared.adapter_store import FolderStore, StoreUnavailableError
from shared.errors import AdapterError, EngineError, ServiceUnavailableError
from tests.unit.worker.parts import held
from worker.adapters import AdapterWatch, StoreSource
from worker.metrics import WorkerMetrics

A, B, C = "a" * 32, "b" * 32, "c" * 32


class FlakyStore(FolderStore):
    """Answers what the test has put down, then the folder."""

    def __init__(self, *answers: Exception) -> None:
        super().__init__(Path("store"))
        self.answers, self.calls, self.discarded = list(answers), 0, list[str]()

    def folder(self, identity: str) -> Path:
        self.calls += 1
        if self.answers:
            raise self.answers.pop(0)
        return Path("store") / identity

    def discard_copy(self, identity: str) -> None:
        self.discarded.append(identity)


def test_a_store_that_is_away_for_a_moment_is_asked_again() -> None:
    store = FlakyStore(StoreUnavailableError("away"), StoreUnavailableError("not there yet"))
    assert StoreSource(store).folder(A) == Path("store") / A
    assert store.calls == 3


def test_patience_ends() -> None:
    store = FlakyStore(*(StoreUnavailableError("away") for _ in range(1000)))
    with pytest.raises(StoreUnavailableError, match="away"):
        StoreSource(store, patience_s=0.2).folder(A)
    assert store.calls < 1000


def test_broken_content_is_an_error_at_once() -> None:
    store = FlakyStore(AdapterError("others than their name says"))
    with pytest.raises(AdapterError):
        StoreSource(store).folder(A)
    assert store.calls == 1


def test_whatever_else_the_store_raises_is_typed_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError) as caught:
        StoreSource(FlakyStore(RuntimeError("/secret"))).folder(A)
    assert "secret" not in caught.value.message


def test_a_worker_that_ends_waits_for_no_store() -> None:
    source = StoreSource(FlakyStore(*(StoreUnavailableError("away") for _ in range(10_000))), patience_s=600.0)
    failures: list[Exception] = []

    def fetch() -> None:
        try:
            source.folder(A)
        except StoreUnavailableError as error:
            failures.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    source.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(failures) == 1


def test_a_damaged_copy_is_discarded() -> None:
    store = FlakyStore()
    StoreSource(store).discard(A)
    assert store.discarded == [A]


# --- what the engine is told ---


class Loop:
    """The engine's thread, as the watch sees it."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.told: list[tuple[Mapping[str, str], frozenset[str]]] = []
        self.news = asyncio.Condition()

    def keep_adapters(self, pinned: Mapping[str, str], retired: frozenset[str]) -> None:
        self.told.append((pinned, retired))

    def has(self, *in_memory: str, resident: tuple[str, ...] = ()) -> None:
        self.stats = EngineStats(adapters=AdapterStats(slots=2, resident=[*resident], in_memory=[*in_memory]))


class Registry:
    """Records, as `Adapters` answers them."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str | None, bool]] = {}
        self.flying: Counter[str] = Counter()
        self.version, self.reads, self.looks = 0, 0, 0
        self.away = False
        self.looked = asyncio.Condition()

    def put(self, name: str, identity: str | None, *, pinned: bool = False) -> None:
        self.found[name] = identity, pinned
        self.version += 1

    def drop(self, name: str) -> None:
        del self.found[name]
        self.version += 1

    async def revision(self) -> int:
        async with self.looked:
            self.looks += 1
            self.looked.notify_all()
        if self.away:
            raise ServiceUnavailableError("m")
        return self.version

    async def in_flight(self, pool: str, lanes: int) -> Counter[str]:
        assert (pool, lanes) == ("pool", 4)
        return self.flying

    async def records(self, pool: str) -> list[AdapterRecord]:
        assert pool == "pool"
        self.reads += 1
        return [
            AdapterRecord(
                name=name, pool=pool, pinned=pinned, content=Content(identity=i, rank=1, bytes=1) if i else None
            )
            for name, (i, pinned) in sorted(self.found.items())
        ]


class Watching:
    def __init__(self, interval_s: float = 600.0) -> None:
        self.registry, self.loop = Registry(), Loop()
        self.watch = AdapterWatch(self.registry, "pool", 4, self.loop, interval_s)  # type: ignore[arg-type]

    @asynccontextmanager
    async def running(self) -> Any:
        task = asyncio.create_task(self.watch.run())
        try:
            async with asyncio.timeout(20):
                await self.looks(1)
                yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def looks(self, count: int) -> None:
        """Until so many looks were begun, and the ones before them are over."""
        async with self.registry.looked:
            await self.registry.looked.wait_for(lambda: self.registry.looks >= count)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def look(self) -> None:
        count = self.registry.looks
        self.watch.look()
        await self.looks(count + 1)


async def test_pinned_names_are_told_by_what_they_stand_for() -> None:
    setup = Watching()
    setup.registry.put("sql", A, pinned=True)
    setup.registry.put("poems", B)
    setup.registry.put("first load under way", None, pinned=True)
    async with setup.running():
        assert setup.loop.told == [({A: "sql"}, frozenset())]


async def test_what_no_name_stands_for_any_more_is_retired() -> None:
    setup = Watching()
    setup.registry.put("sql", A)
    setup.registry.put("poems", B)
    setup.loop.has(A, resident=(B,))
    async with setup.running():
        assert setup.loop.told == []
        setup.registry.put("sql", C)  # a reload
        setup.registry.drop("poems")
        await setup.look()
        assert setup.loop.told == [({}, frozenset({A, B}))]
        setup.loop.has()
        setup.registry.put("again", A)
        await setup.look()
        assert setup.loop.told[-1] == ({}, frozenset())


async def test_what_jobs_pin_that_are_still_to_come_is_kept() -> None:
    setup = Watching(interval_s=0.01)
    setup.registry.put("sql", A)
    setup.registry.flying[A] = 2
    setup.loop.has(A, B)
    async with setup.running():
        setup.registry.put("sql", C)
        await setup.look()
        assert setup.loop.told == [({}, frozenset({B}))]
        setup.registry.flying[A] = 0  # and no message says so
        await setup.looks(setup.registry.looks + 2)
        assert setup.loop.told[-1] == ({}, frozenset({A, B}))


async def test_records_are_read_only_where_something_has_changed_and_the_engine_told_only_news() -> None:
    setup = Watching()
    setup.registry.put("sql", A)
    setup.loop.has(A)
    async with setup.running():
        for _ in range(5):
            await setup.look()
        assert (setup.registry.reads, setup.loop.told) == (1, [])


async def test_a_lost_message_is_made_up_for() -> None:
    setup = Watching(interval_s=0.01)
    setup.loop.has(A)
    setup.registry.put("sql", A)
    async with setup.running():
        setup.registry.drop("sql")
        await setup.looks(setup.registry.looks + 2)
        assert setup.loop.told == [({}, frozenset({A}))]


async def test_redis_being_away_retires_nothing() -> None:
    setup = Watching()
    setup.loop.has(A)
    setup.registry.put("sql", A)
    async with setup.running():
        setup.registry.away = True
        setup.registry.drop("sql")
        await setup.look()
        assert setup.loop.told == []
        setup.registry.away = False
        await setup.look()
        assert setup.loop.told == [({}, frozenset({A}))]


# --- the job's request ---


def test_a_job_is_computed_with_the_content_that_it_names() -> None:
    job = held()
    job.envelope.adapter, job.envelope.adapter_identity = "sql", A
    request = job.request()
    assert (request.adapter, request.adapter_name) == (A, "sql")
    assert held().request().adapter is None


@pytest.mark.parametrize("identity", [None, "", "sql", "../../etc", "A" * 32, "a" * 33])
def test_a_job_without_its_content_is_never_the_base_models(identity: str | None) -> None:
    job = held()
    job.envelope.adapter, job.envelope.adapter_identity = "sql", identity
    with pytest.raises(ValueError, match="adapter"):
        job.request()


# --- metrics ---


def test_metrics_of_adapters() -> None:
    metrics = WorkerMetrics("m")

    def sample(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"ropeway_{name}", {"model_name": "m", **labels})

    first = AdapterStats(
        slots=2, resident=[A], in_memory=[A, B], loading=[C], loads=2, load_failures=1, load_seconds=[0.5, 0.25],
        fills=3, evictions=1, loading_requests=4, waiting_requests=5, running_requests=6,
    )  # fmt: skip
    metrics.engine(EngineStats(adapters=first))
    assert [sample(f"adapter{name}") for name in ("_slots", "s_resident", "s_in_memory", "s_loading")] == [2, 1, 2, 1]
    assert [sample(f"adapter_{name}_total") for name in ("loads", "load_failures")] == [2, 1]
    assert [sample(f"adapter_slot_{name}_total") for name in ("fills", "evictions")] == [3, 1]
    assert [sample("adapter_requests", state=state) for state in ("loading", "waiting", "running")] == [4, 5, 6]
    assert (sample("adapter_load_seconds_count"), sample("adapter_load_seconds_sum")) == (2, 0.75)
    second = replace(first, loads=3, load_seconds=[0.5, 0.25, 1.0], fills=4)
    metrics.engine(EngineStats(adapters=second))
    metrics.engine(EngineStats(adapters=second))
    assert (sample("adapter_load_seconds_count"), sample("adapter_load_seconds_sum")) == (3, 1.75)
    assert (sample("adapter_loads_total"), sample("adapter_slot_fills_total")) == (3, 4)
