"""Adapters in memory: read once beside the steps, bounded, kept while wanted; a failure is that adapter's alone."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from engine.adapters.library import AdapterLibrary
from engine.adapters.weights import Adapter
from shared.errors import AdapterError, EngineError
from tests.support.engine_harness import LateExecutor, adapters


def names(library: AdapterLibrary, candidates: str = "abcdef") -> str:
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
