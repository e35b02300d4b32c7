"""Library and slots under one engine, a real one and the simulated: who is where, and who leaves when told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.request import AdapterStats, EngineProtocol, EngineRequest
from engine.sim import SimConfig, SimEngine
from shared.errors import UnsupportedParameterError
from shared.sampling import SamplingParams
from tests.support.engine_harness import InlineExecutor, adapters, make_engine
from tests.support.fake_runner import FakeRunner, scripted

FOREVER = scripted([65] * 1000)


@pytest.fixture(autouse=True)
def _inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are read in the order in which they are wanted."""
    monkeypatch.setattr("engine.adapters.library.ThreadPoolExecutor", lambda *_, **__: InlineExecutor())


def real() -> EngineProtocol:
    return make_engine(FakeRunner(64, 4, next_token=FOREVER), adapters("abcdef", capacity=3), max_loras=2)


def sim() -> EngineProtocol:
    return SimEngine(SimConfig(step_ms=0, max_loras=2, max_cpu_loras=3))


def add(engine: EngineProtocol, name: str, adapter: str | None, **fields: object) -> None:
    params = SamplingParams(**{"max_tokens": 50, "seed": 1, "ignore_eos": True, **fields})  # type: ignore[arg-type]
    engine.add(EngineRequest(name, [1, 2, 3], params, adapter=adapter))


def steps(engine: EngineProtocol, until: Callable[[AdapterStats], bool]) -> AdapterStats:
    """Step until the adapters are as they should be."""
    for _ in range(200):
        engine.step()
        engine.check()
        if until(stats := engine.stats().adapters):
            return stats
    raise AssertionError(f"never: {stats}")


both = pytest.mark.parametrize("make", [real, sim])


@both
def test_a_snapshot_says_where_adapters_and_their_requests_are(make: Callable[[], EngineProtocol]) -> None:
    engine = make()
    add(engine, "base", None)
    for number, adapter in enumerate("aabcd"):
        add(engine, f"{adapter}{number}", adapter)
    stats = steps(engine, lambda stats: len(stats.in_memory) == 3 and stats.running_requests == 3)
    assert stats.slots == 2
    assert sorted(stats.resident) == ["a", "b"]
    assert sorted(stats.in_memory) == ["a", "b", "c"]
    assert stats.loading == ["d"]
    assert (stats.loading_requests, stats.waiting_requests, stats.running_requests) == (1, 1, 3)
    assert (stats.loads, stats.load_failures, stats.fills, stats.evictions) == (3, 0, 2, 0)
    assert len(stats.load_seconds) == 3


@both
def test_slots_that_change_hands_are_counted(make: Callable[[], EngineProtocol]) -> None:
    engine = make()
    for adapter in "abcdef":
        add(engine, adapter, adapter, max_tokens=3)
    while engine.has_work():
        engine.step()
        engine.check()
    stats = engine.stats().adapters
    assert (stats.loads, stats.fills, stats.evictions) == (6, 6, 4)
    assert (len(stats.resident), len(stats.in_memory), stats.loading) == (2, 3, [])


@both
def test_a_retired_adapter_leaves_slot_and_memory_behind_its_last_request(make: Callable[[], EngineProtocol]) -> None:
    engine = make()
    for name in ("a1", "a2", "b1"):
        add(engine, name, name[0])
    steps(engine, lambda stats: len(stats.resident) == 2)
    engine.keep_adapters({}, ["a", "b"])
    assert sorted(engine.stats().adapters.resident) == ["a", "b"], "those that run go on"
    engine.abort("a1")
    engine.abort("b1")
    engine.check()
    assert engine.stats().adapters.resident == engine.stats().adapters.in_memory == ["a"]
    engine.abort("a2")
    engine.check()
    stats = engine.stats().adapters
    assert (stats.resident, stats.in_memory, stats.evictions) == ([], [], 2)


@both
def test_one_that_nobody_uses_leaves_at_once(make: Callable[[], EngineProtocol]) -> None:
    engine = make()
    add(engine, "a", "a")
    steps(engine, lambda stats: stats.resident == ["a"])
    engine.abort("a")
    assert engine.stats().adapters.in_memory == ["a"]
    engine.keep_adapters({}, ["a"])
    assert (engine.stats().adapters.resident, engine.stats().adapters.in_memory) == ([], [])
    engine.check()


@pytest.mark.parametrize("state", ["loading", "waiting", "running"])
@both
def test_an_aborted_request_in_any_state_leaves_nothing_of_a_retired_adapter(
    make: Callable[[], EngineProtocol], state: str
) -> None:
    engine = make()
    others = {"loading": "bcd", "waiting": "bc", "running": ""}[state]
    for other in others:
        add(engine, other, other)
    steps(engine, lambda stats: len(stats.in_memory) == len(others))
    add(engine, "a", "a")
    stats = steps(engine, lambda stats: getattr(stats, f"{state}_requests") > 0 and not (others and stats.loads < 2))
    assert ("a" in stats.in_memory, "a" in stats.resident) == (state != "loading", state == "running")
    engine.keep_adapters({}, ["a"])
    engine.abort("a")
    engine.check()
    stats = engine.stats().adapters
    assert "a" not in [*stats.resident, *stats.in_memory, *stats.loading]
    for other in others:
        engine.abort(other)
    engine.check()


@both
def test_pinned_ones_are_read_ahead_with_no_request(make: Callable[[], EngineProtocol]) -> None:
    engine = make()
    engine.keep_adapters({"a": "one", "b": "two"}, [])
    while engine.has_work():
        assert engine.step() == []
    assert sorted(engine.stats().adapters.in_memory) == ["a", "b"]
    engine.check()


def test_texts_of_adapters_differ_and_do_not_depend_on_slots() -> None:
    def text(engine: SimEngine, name: str) -> list[int]:
        ids: list[int] = []
        while engine.has_work():
            for output in engine.step():
                if output.request_id == name:
                    ids += [token for delta in output.choices for token in delta.token_ids]
        return ids

    alone = {}
    for adapter in ("a", "b", None):
        engine = SimEngine(SimConfig(step_ms=0, max_loras=1))
        add(engine, "x", adapter)
        alone[adapter] = text(engine, "x")
    assert len({tuple(ids) for ids in alone.values()}) == 3
    engine = SimEngine(SimConfig(step_ms=0, max_loras=1, max_num_seqs=2))
    for other in "bcde":
        add(engine, other, other, max_tokens=5)
    add(engine, "x", "a")
    assert text(engine, "x") == alone["a"]


def test_a_simulated_engine_without_slots_serves_no_adapters() -> None:
    with pytest.raises(UnsupportedParameterError, match="enable_lora"):
        add(SimEngine(SimConfig()), "x", "a")
