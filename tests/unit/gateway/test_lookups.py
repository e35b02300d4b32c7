"""What is remembered of Redis's answers: for seconds, over changes that are heard of, and through an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway import lookups
from gateway.lookups import Lookups
from shared.errors import ForeignDataError, ServiceUnavailableError


class Source:
    """Answers, and what was asked for."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {"a": "1"}
        self.asked = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, name: str) -> str | None:
        self.asked += 1
        value = self.values.get(name)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return value


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lookups, "time", clock)
    return clock


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def known(source: Source) -> Lookups[str]:
    return Lookups(source.ask, fresh_s=5, outage_s=60)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_an_answer_holds_for_a_while(clock: Clock, source: Source, known: Lookups[str]) -> None:
    assert await known.find("a") == "1"
    source.values["a"] = "2"
    clock.now += 4.9
    assert await known.find("a") == "1" and source.asked == 1
    clock.now += 0.1
    assert await known.find("a") == "2" and source.asked == 2
    del source.values["a"]
    clock.now += 5
    assert await known.find("a") is None


async def test_what_is_not_there_is_asked_for_each_time(source: Source, known: Lookups[str]) -> None:
    for _ in range(3):
        assert await known.find("b") is None
    source.values["b"] = "now"
    assert await known.find("b") == "now" and source.asked == 4


async def test_a_change_that_is_heard_of_holds_at_once(source: Source, known: Lookups[str]) -> None:
    await known.find("a")
    source.values["a"] = "2"
    known.forget("a")
    assert await known.find("a") == "2"
    source.values["a"] = "3"
    known.doubt()
    await asyncio.sleep(0.001)
    assert await known.find("a") == "3"


async def test_an_answer_on_its_way_is_older_than_a_change(source: Source, known: Lookups[str]) -> None:
    source.gate.clear()
    asked = asyncio.create_task(known.find("a"))
    await until(lambda: source.asked == 1)
    source.values["a"] = "2"
    known.forget("a")
    source.gate.set()
    assert await asked == "2" and await known.find("a") == "2"


async def test_all_that_wait_share_a_question_that_none_breaks_off(source: Source, known: Lookups[str]) -> None:
    source.gate.clear()
    asking = [asyncio.create_task(known.find("a")) for _ in range(5)]
    await until(lambda: source.asked == 1)
    asking[0].cancel()
    source.gate.set()
    assert (await asyncio.gather(*asking, return_exceptions=True))[1:] == ["1"] * 4
    assert source.asked == 1


async def test_through_an_outage_what_is_known_goes_on_for_a_bounded_time(
    clock: Clock, source: Source, known: Lookups[str]
) -> None:
    await known.find("a")
    source.error = ServiceUnavailableError("away")
    clock.now += 30
    assert await known.find("a") == "1"
    assert await known.find("a") == "1"
    assert source.asked == 2, "not every request waits for an answer that does not come"
    clock.now += lookups.PAUSE_S
    assert await known.find("a") == "1" and source.asked == 3
    with pytest.raises(ServiceUnavailableError):
        await known.find("unknown")
    clock.now += 30
    with pytest.raises(ServiceUnavailableError):
        await known.find("a")
    source.error, source.values["a"] = None, "2"
    assert await known.find("a") == "2"


async def test_what_was_revoked_does_not_come_back_with_an_outage(
    clock: Clock, source: Source, known: Lookups[str]
) -> None:
    await known.find("a")
    source.error = ServiceUnavailableError("away")
    known.forget("a")
    with pytest.raises(ServiceUnavailableError):
        await known.find("a")
    source.error = None
    await known.find("a")
    clock.now += 5
    source.gate.clear()  # it is being asked for anew, and no answer comes
    source.error = ServiceUnavailableError("away")
    asked = asyncio.create_task(known.find("a"))
    await until(lambda: source.asked == 4)
    known.forget("a")
    source.gate.set()
    with pytest.raises(ServiceUnavailableError):
        await asked


async def test_a_silent_redis_is_not_waited_for_long(
    clock: Clock, source: Source, known: Lookups[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "PATIENCE_S", 0.01)
    await known.find("a")
    clock.now += 5
    source.gate.clear()
    assert await known.find("a") == "1"
    source.gate.set()


async def test_another_error_is_one(clock: Clock, source: Source, known: Lookups[str]) -> None:
    await known.find("a")
    clock.now += 5
    source.error = ForeignDataError("broken")
    with pytest.raises(ForeignDataError):
        await known.find("a")


async def test_memory_is_bounded(source: Source, known: Lookups[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MOST", 3)
    source.values = {str(n): "x" for n in range(10)}
    for n in range(10):
        await known.find(str(n))
        await known.find("0")
    assert len(known._entries) == 3 and "0" in known._entries
