"""Adapters in the batch: never more than there are slots, nobody starves, one's failure is not another's."""

from __future__ import annotations

from typing import Any

import pytest

from engine.engine import Engine
from tests.support.engine_harness import LateExecutor, adapters, make_engine, request, run
from tests.support.fake_runner import FakeRunner, FaultyRunner, scripted

FOREVER = scripted([65] * 1000, [66] * 1000)


class Crowd:
    """One running engine, and requests that keep coming."""

    def __init__(self, max_loras: int, **settings: Any) -> None:
        self.runner = FakeRunner(64, 4, next_token=FOREVER)
        settings = {"max_num_seqs": 4, "max_bypasses": 3} | settings
        self.engine = make_engine(self.runner, max_loras=max_loras, **settings)
        self.ended: list[str] = []
        self._count = 0

    def add(self, adapter: str | None, tokens: int = 6, **fields: Any) -> str:
        self._count += 1
        name = f"{adapter}{self._count}"
        self.engine.add(request(name, adapter=adapter, max_tokens=tokens, **fields))
        return name

    def step(self) -> None:
        self.ended += [output.request_id for output in self.engine.step() if output.finished]
        self.engine.check()
        assert len({self.runner.slots[s] for s in self.runner.slots}) == len(self.runner.slots)


def test_base_and_adapters_share_a_pass() -> None:
    crowd = Crowd(max_loras=2)
    for adapter in ("a", None, "b"):
        crowd.add(adapter)
    crowd.step()
    assert [name for name, *_ in crowd.runner.plans[0]] == ["a1", "None2", "b3"]
    assert crowd.runner.fills == [(0, "a"), (1, "b")]


def test_no_more_adapters_than_slots_and_others_pass_by() -> None:
    crowd = Crowd(max_loras=1, max_bypasses=100)
    for adapter in ("a", "b", None, "a"):
        crowd.add(adapter)
    crowd.step()
    assert [name for name, *_ in crowd.runner.plans[0]] == ["a1", "None3", "a4"]
    while crowd.engine.has_work():
        crowd.step()
    assert crowd.ended[-1] == "b2"
    assert crowd.runner.fills == [(0, "a"), (0, "b")]


@pytest.mark.parametrize("rare", [1, 3])
def test_a_rare_adapter_gets_its_turn_behind_a_busy_one(rare: int) -> None:
    crowd = Crowd(max_loras=1)
    crowd.add("a")
    crowd.step()
    wanted = [crowd.add("b") for _ in range(rare)]
    for _ in range(60):
        crowd.add("a")
        crowd.step()
    assert set(wanted) <= set(crowd.ended)
    assert sum(name.startswith("a") for name in crowd.ended) > 10  # nor does the busy one starve


def test_a_busy_adapter_gets_its_turn_behind_many_rare_ones() -> None:
    crowd = Crowd(max_loras=1)
    wanted = [crowd.add("a") for _ in range(4)]
    for turn in range(80):
        crowd.add("bcd"[turn % 3])
        crowd.step()
    assert set(wanted) <= set(crowd.ended)


def test_every_adapter_of_a_steady_mix_goes_on() -> None:
    crowd = Crowd(max_loras=2, max_num_seqs=2)
    for _ in range(40):
        for adapter in "abcd":
            crowd.add(adapter, tokens=3)
        for _ in range(3):
            crowd.step()
    counts = {adapter: sum(name.startswith(adapter) for name in crowd.ended) for adapter in "abcd"}
    assert min(counts.values()) > 0.5 * max(counts.values()), counts


@pytest.mark.parametrize("flood", [1, 4])
def test_a_rare_adapter_waits_for_two_sequences_at_most_behind_a_flood(flood: int) -> None:
    crowd = Crowd(max_loras=1, max_num_seqs=8)
    for index in range(6):
        crowd.add("a", tokens=6 + index)
    crowd.step()
    wanted = crowd.add("b", tokens=2)
    for _ in range(30):  # 11 for those that run, 11 for the last that joins them, and some to count and to prefill
        for index in range(flood):
            crowd.add("a", tokens=6 + index)
        crowd.step()
    assert wanted in crowd.ended


def test_all_that_wait_for_an_adapter_share_one_visit_to_a_slot() -> None:
    crowd = Crowd(max_loras=2, max_num_seqs=64)
    for turn in range(8):
        for adapter in "abcd":
            crowd.add(adapter, tokens=10 + turn % 2)
    while crowd.engine.has_work():
        crowd.step()
    assert sorted(adapter for _, adapter in crowd.runner.fills) == list("abcd")


def test_a_higher_class_takes_a_slot_from_a_lower_one() -> None:
    crowd = Crowd(max_loras=1, max_bypasses=1000)
    low = [crowd.add("a", tokens=40, priority=2) for _ in range(2)]
    crowd.step()
    crowd.add("b", tokens=2, priority=0)
    crowd.step()
    assert [name for name, *_ in crowd.runner.plans[-1]] == ["b3"]
    while crowd.engine.has_work():
        crowd.step()
    assert crowd.ended == ["b3", *low]


def test_an_equal_class_waits() -> None:
    crowd = Crowd(max_loras=1, max_bypasses=1000)
    crowd.add("a", tokens=10, priority=1)
    crowd.step()
    crowd.add("b", tokens=2, priority=1)
    for _ in range(5):
        crowd.step()
    assert {name for plan in crowd.runner.plans for name, *_ in plan} == {"a1"}


def test_a_preempted_sequence_comes_back_to_its_adapter() -> None:
    runner = FakeRunner(10, 4)
    engine = make_engine(runner, max_loras=1, max_num_seqs=4, watermark=0.0)
    items = [request(name, prompt=[1] * 9, adapter="a", max_tokens=20, ignore_eos=True) for name in "xy"]
    together = run(engine, *items)
    assert sum(transcript.last.preemptions for transcript in together.values() if transcript.last is not None) > 0
    for item in items:
        assert run(make_engine(FakeRunner(64, 4)), item)[item.id].choices == together[item.id].choices


def test_while_an_adapter_is_read_others_go_on() -> None:
    late = LateExecutor()
    library = adapters("ab", executor=late)
    engine = make_engine(FakeRunner(64, 4, next_token=FOREVER), library)
    engine.add(request("base", max_tokens=30))
    engine.add(request("late", adapter="a", max_tokens=2))
    for _ in range(10):
        assert [output.request_id for output in engine.step()] == ["base"]
    late.run()
    assert {output.request_id for output in engine.step()} == {"base", "late"}
    while engine.has_work():
        engine.step()
        engine.check()


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone() -> None:
    engine = make_engine(library=adapters(["a", "broken"]))
    ended = run(engine, *(request(f"{name}{i}", adapter=name) for i in range(3) for name in ("a", "broken")))
    for name, transcript in ended.items():
        assert transcript.last is not None
        assert (transcript.last.error is not None) == name.startswith("broken")


def test_an_adapter_that_does_not_get_into_its_slot_fails_its_requests_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner = FaultyRunner(64, 4)
    runner.unfit = {"b"}
    engine = make_engine(runner, max_loras=2)
    ended = run(engine, *(request(f"{name}{i}", adapter=name) for i in range(3) for name in "ab"))
    for name, transcript in ended.items():
        assert transcript.last is not None
        assert (transcript.last.error is not None) == name.startswith("b")
    runner.unfit = set()
    assert run(engine, request("again", adapter="b"))["again"].last.error is None  # type: ignore[union-attr]


def test_waiting_for_an_adapter_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateExecutor()
    engine: Engine = make_engine(library=adapters("a", executor=late))
    engine.add(request("r", adapter="a"))
    waits: list[float] = []
    poll = engine.library.poll  # type: ignore[union-attr]
    monkeypatch.setattr(engine.library, "poll", lambda timeout=0.0: waits.append(timeout) or poll(0.0))  # type: ignore[func-returns-value]
    assert engine.step() == []
    assert waits == [0.0, 0.05]


@pytest.mark.parametrize("state", ["reading", "waiting", "running"])
def test_an_aborted_request_gives_everything_back(state: str) -> None:
    late = LateExecutor()
    library = adapters("ab", capacity=2, executor=late)
    engine = make_engine(FakeRunner(64, 4, next_token=FOREVER), library, max_loras=1)
    if state == "waiting":
        engine.add(request("other", adapter="b", max_tokens=50))
        late.run()
        engine.step()
    engine.add(request("r", adapter="a", max_tokens=50))
    if state != "reading":
        late.run()
        engine.step()
    assert engine.abort("r") is not None
    engine.check()
    if state == "waiting":
        engine.abort("other")
    engine.check()
    assert not engine.has_work()
    assert engine._scheduler.slots is not None
    engine._scheduler.slots.check({})
    library.register("c", library._folders["a"])
    assert not library._wanted
