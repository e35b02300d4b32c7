"""Adapters in memory: read once beside the steps, bounded, kept while wanted; a failure is that adapter's alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path

import pytest

from engine.adapters.library import AdapterLibrary
from engine.adapters.weights import Adapter
from shared.errors import AdapterError, EngineError, RopewayError, ServiceUnavailableError
from tests.support.engine_harness import InlineExecutor, LateExecutor, adapters


def names(library: AdapterLibrary[Adapter], candidates: Iterable[str] = "abcdef") -> str:
    return "".join(name for name in candidates if name in library)


def test_reading_goes_on_beside_the_caller_in_a_thread_of_its_own() -> None:
    gate, threads = threading.Event(), []

    def read(folder: Path) -> Adapter:
        threads.append(threading.current_thread())
        assert gate.wait(20)
        return Adapter(folder.name, 1, {})

    library = AdapterLibrary(read, 4)
    library.register("a", Path("a"))
    library.want("a")
    assert library.poll(0.01) == {}
    assert library.pending
    assert "a" not in library
    gate.set()
    assert library.poll(20) == {}
    assert not library.pending
    assert library.get("a").identity == "a"
    assert threads[0] is not threading.current_thread()
    library.close()


def test_many_first_requests_read_once() -> None:
    late = LateExecutor()
    library = adapters("a", executor=late)
    for _ in range(50):
        library.want("a")
    assert len(late.waiting) == library.reads == 1
    late.run()
    library.poll()
    library.want("a")
    assert (library.reads, library.hits) == (1, 1)


def test_memory_is_bounded_and_what_is_wanted_stays() -> None:
    library = adapters("abcdef", capacity=2)
    for name in "ab":
        library.want(name)
    library.poll()
    assert names(library) == "ab"
    library.want("c")
    library.want("d")
    library.poll()
    assert names(library) == "ab"
    library.let_go("b")
    library.poll()
    assert names(library) == "ac"
    library.let_go("a")
    library.let_go("c")
    library.poll()
    assert "d" in library
    assert len(names(library)) == 2


def test_the_least_recently_used_is_forgotten_first() -> None:
    library = adapters("abc", capacity=2)
    for name in "ab":
        library.want(name)
        library.poll()
        library.let_go(name)
    library.get("a")
    library.want("c")
    library.poll()
    assert names(library) == "ac"


def test_what_is_being_read_counts() -> None:
    late = LateExecutor()
    library = adapters("abc", capacity=2, executor=late)
    for name in "abc":
        library.want(name)
    assert len(late.waiting) == 2
    library.let_go("a")  # too late to stop it
    late.run()
    library.poll()
    assert names(library) == ""  # forgotten for c, since nobody wants it any more
    assert len(late.waiting) == 2


def test_a_failure_is_told_once_and_tried_again_when_wanted_again() -> None:
    library = adapters(["broken", "a"])
    library.want("broken")
    library.want("broken")
    library.want("a")
    failures = library.poll()
    assert list(failures) == ["broken"]
    assert isinstance(failures["broken"], AdapterError)
    library.let_go("broken")
    library.let_go("broken")
    assert library.poll() == {}
    assert "a" in library
    library.want("broken")
    assert list(library.poll()) == ["broken"]
    assert library.reads == 3


def test_an_unforeseen_failure_tells_the_client_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    def read(folder: Path) -> Adapter:
        raise OSError("/secret/path")

    library = AdapterLibrary(read, 1)
    library.register("a", Path("a"))
    library.want("a")
    with caplog.at_level(logging.ERROR):
        failures = library.poll(20)
    assert isinstance(failures["a"], EngineError)
    assert "secret" not in failures["a"].message
    assert "/secret/path" in caplog.text
    library.close()


def test_files_that_changed_since_they_were_registered_are_refused() -> None:
    library = AdapterLibrary(lambda folder: Adapter("new", 1, {}), 1)
    library.register("old", Path("x"))
    library.want("old")
    assert "changed" in library.poll(20)["old"].message
    library.close()


def test_an_unregistered_adapter_takes_no_requests_and_those_that_wait_go_on() -> None:
    late = LateExecutor()
    library = adapters("ab", capacity=1, executor=late)
    library.want("a")
    library.want("b")
    library.unregister("b")
    assert not library.knows("b")
    late.run()
    library.poll()
    library.let_go("a")
    late.run()
    assert library.poll() == {}
    assert "b" in library


def test_at_least_one() -> None:
    with pytest.raises(ValueError, match="max_cpu_loras"):
        adapters("a", capacity=0)


# --- a source, pins, retirement ---


class Store:
    """A source whose adapters appear when the test says so."""

    def __init__(self, *identities: str) -> None:
        self.has, self.asked, self.discarded = set(identities), list[str](), list[str]()

    def folder(self, identity: str) -> Path:
        self.asked.append(identity)
        if identity not in self.has:
            raise ServiceUnavailableError(f"{identity} is not there")
        return Path(identity)

    def discard(self, identity: str) -> None:
        self.discarded.append(identity)

    def close(self) -> None:
        """Nobody waits."""


def from_store(store: Store, capacity: int = 4, executor: Executor | None = None) -> AdapterLibrary[Adapter]:
    return AdapterLibrary(
        lambda folder: Adapter(folder.name, 1, {}), capacity, executor or InlineExecutor(), source=store
    )


def settle(library: AdapterLibrary[Adapter]) -> dict[str, RopewayError]:
    failures: dict[str, RopewayError] = {}
    while library.pending:
        failures |= library.poll()
    return failures


def test_what_is_not_registered_comes_from_the_source_once() -> None:
    store = Store("a")
    library = from_store(store)
    for _ in range(50):
        library.want("a", "sql")
    assert settle(library) == {}
    assert "a" in library
    assert (store.asked, library.reads, library.loads, len(library.load_seconds)) == (["a"], 1, 1, 1)


def test_files_are_fetched_while_there_is_no_room_in_memory_and_read_when_there_is() -> None:
    store = Store("a", "b")
    library = from_store(store, capacity=1)
    library.want("a")
    settle(library)
    library.want("b")
    settle(library)
    assert (store.asked, names(library), library.loading) == (["a", "b"], "a", ["b"])
    library.let_go("a")
    settle(library)
    assert names(library) == "b"
    library.check({"b": 1})


def test_one_that_the_source_does_not_have_holds_up_nobody_and_is_tried_again() -> None:
    store, late = Store("a"), LateExecutor()
    library = from_store(store, capacity=1, executor=late)
    library.want("lost")
    library.want("a")
    late.run(1)
    library.poll()
    late.run(1)
    library.poll()
    assert names(library) == "a", "although the other one is still being looked for"
    late.run()
    assert list(library.poll()) == ["lost"]
    assert list(library.failed) == ["lost"]
    assert library.load_failures == 1
    library.let_go("lost")
    library.let_go("a")
    store.has.add("lost")
    library.want("lost")
    late.run()
    library.poll()
    late.run()
    assert library.poll() == {}
    assert names(library, ["lost"]) == "lost"
    assert library.failed == {}


def test_what_was_fetched_for_nobody_any_more_is_not_read() -> None:
    late = LateExecutor()
    library = from_store(Store("a"), executor=late)
    library.want("a")
    assert library.awaited
    library.let_go("a")
    assert library.pending
    assert not library.awaited
    late.run()
    library.poll()
    assert (library.reads, late.waiting) == (0, [])


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_copy_is_discarded_and_fetched_anew_once(damaged: int) -> None:
    store, contents = Store("a"), ["other"] * damaged + ["a"]
    library = AdapterLibrary(lambda folder: Adapter(contents.pop(0), 1, {}), 1, InlineExecutor(), source=store)
    library.want("a")
    failures = settle(library)
    assert (store.discarded, store.asked) == (["a"] * damaged, ["a", "a"])
    if damaged == 1:
        assert failures == {}
        assert "a" in library
    else:
        assert "changed" in failures["a"].message


def test_pinned_ones_are_read_ahead_and_stay() -> None:
    library = from_store(Store(*"abcdef"), capacity=3)
    library.pin({"a": "first", "b": "second"})
    assert library.awaited
    settle(library)
    assert names(library) == "ab"
    for name in "cdef":
        library.want(name)
        settle(library)
        library.let_go(name)
    assert names(library) == "abf"
    library.pin({"b": "second"})
    for name in "cd":
        library.want(name)
        settle(library)
    assert names(library) == "bcd"
    library.check({"c": 1, "d": 1})


def test_there_is_always_room_for_one_that_is_not_pinned(caplog: pytest.LogCaptureFixture) -> None:
    library = from_store(Store(*"abcd"), capacity=2)
    for _ in range(3):
        library.pin({"a": "one", "b": "two", "c": "three"})
    settle(library)
    library.want("d")
    settle(library)
    assert names(library) == "ad"
    assert [record.message for record in caplog.records if "2 of the pinned" in record.message] != []
    assert len(caplog.records) == 1, "said once"


def test_a_request_goes_before_what_is_only_pinned() -> None:
    late = LateExecutor()
    library = from_store(Store("a", "b"), capacity=2, executor=late)
    library.want("x")
    library.want("y")
    library.pin({"a": "pinned"})
    library.want("b")
    for _ in range(4):
        late.run()
    library.poll()
    library.let_go("x")
    for _ in range(len(late.waiting)):
        late.run()
    library.poll()
    assert names(library) in ("b", "ab")


def test_a_pinned_one_that_cannot_be_had_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("engine.adapters.library.time.monotonic", lambda: now)
    store = Store()
    library = from_store(store)
    library.pin({"a": "pinned"})
    settle(library)
    library.pin({"a": "pinned"})
    assert store.asked == ["a"], "not with every heartbeat"
    now += 31
    store.has.add("a")
    library.pin({"a": "pinned"})
    settle(library)
    assert names(library) == "a"


def test_a_retired_one_leaves_with_its_last_request() -> None:
    library = from_store(Store(*"ab"))
    for name in "aab":
        library.want(name)
        settle(library)
    library.let_go("b")
    library.retire(["a", "b"])
    assert names(library) == "a"
    assert library.retired("b")
    assert not library.retired("a")
    library.let_go("a")
    assert "a" in library
    library.let_go("a")
    assert (names(library), library.retired("a")) == ("", True)


def test_one_that_came_back_is_retired_no_more() -> None:
    library = from_store(Store("a"))
    library.want("a")
    settle(library)
    library.retire(["a"])
    library.retire([])
    library.let_go("a")
    assert names(library) == "a"


def test_the_log_names_it(caplog: pytest.LogCaptureFixture) -> None:
    library = from_store(Store())
    library.want("0f" * 16, "sql")
    assert settle(library) != {}
    assert f"adapter sql ({'0f' * 16}) cannot be served" in caplog.text


def test_the_check_finds_what_is_counted_wrongly() -> None:
    library = from_store(Store("a"))
    library.want("a")
    library.check({"a": 1})
    with pytest.raises(AssertionError):
        library.check({})
