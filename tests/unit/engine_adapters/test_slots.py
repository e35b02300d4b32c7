"""Slots: pinned while in use, least recently used first, claimed by who has waited long."""

from __future__ import annotations

import pytest

from engine.adapters.slots import AdapterSlots


def slots(count: int, memory: str = "abcdef") -> AdapterSlots:
    return AdapterSlots(count, memory.__contains__)


def use(slots: AdapterSlots, identity: str) -> int:
    """Acquire it for a sequence, and release it."""
    assert slots.available(identity)
    index = slots.acquire(identity)
    slots.release(identity)
    return index


def test_one_slot_holds_one_adapter_however_many_use_it() -> None:
    s = slots(2)
    assert s.acquire("a") == s.acquire("a") == 0
    assert s.acquire("b") == 1
    assert s.take_fills() == [(0, "a"), (1, "b")]
    assert s.take_fills() == []
    s.check({"a": 2, "b": 1})
    with pytest.raises(AssertionError):
        s.check({"a": 1, "b": 1})


def test_a_slot_in_use_is_never_given_away() -> None:
    s = slots(2)
    s.acquire("a")
    s.acquire("b")
    assert not s.available("c")
    with pytest.raises(RuntimeError):
        s.acquire("c")
    s.release("b")
    assert s.available("c")
    assert s.acquire("c") == 1
    assert s.resident == {"a": 0, "c": 1}


def test_the_least_recently_used_goes_first_and_an_empty_slot_before_any() -> None:
    s = slots(3)
    assert [use(s, name) for name in "ab"] == [0, 1]
    assert use(s, "c") == 2
    use(s, "a")
    s.take_fills()
    assert use(s, "d") == 1  # in the place of b
    assert use(s, "a") == 0
    assert use(s, "e") == 2
    assert s.take_fills() == [(1, "d"), (2, "e")]


def test_what_is_resident_is_not_filled_again() -> None:
    s = slots(1)
    use(s, "a")
    s.take_fills()
    use(s, "a")
    assert s.take_fills() == []


def test_what_is_not_in_memory_gets_no_slot() -> None:
    s = slots(2, memory="a")
    assert not s.available("b")
    s.claim("b")
    assert s.available("a")


def test_a_claimed_slot_takes_no_new_sequence_and_changes_hands_when_it_is_empty() -> None:
    s = slots(2)
    for name in "aabbb":
        s.acquire(name)
    s.begin()
    s.claim("c", at_once=True)  # the slot of a has the fewest
    assert not s.available("a")
    assert s.available("b")
    assert not s.available("c")
    s.release("a")
    s.release("a")
    assert not s.available("d")
    assert s.available("c")
    assert s.acquire("c") == 0
    s.begin()
    assert not s.available("a")
    s.release("c")
    assert s.available("a")


def test_a_claimed_slot_takes_its_adapter_s_sequences_until_the_first_of_them_has_ended() -> None:
    s = slots(1)
    s.acquire("a")
    for _ in range(3):
        s.begin()
        s.claim("b")
        assert s.available("a")
        s.acquire("a")
    s.release("a")
    s.begin()
    s.claim("b")
    assert not s.available("a")
    for _ in range(3):
        s.release("a")
    assert s.available("b")
    assert not s.available("a")
    s.acquire("b")
    s.begin()
    s.claim("a")
    assert s.available("b")  # nothing of this visit has ended


def test_an_empty_slot_that_is_claimed_is_for_nobody_else() -> None:
    s = slots(1)
    use(s, "a")
    s.claim("b")
    assert not s.available("a")
    assert s.available("b")


def test_two_claims_take_two_slots_and_a_third_none() -> None:
    s = slots(2)
    for name in "ab":
        s.acquire(name)
    for name in "ccde":
        s.claim(name, at_once=True)
    assert not any(map(s.available, "abcde"))
    s.release("a")
    assert [name for name in "abcde" if s.available(name)] == ["c"]
    s.release("b")
    assert [name for name in "abcde" if s.available(name)] == ["c", "d"]


def test_claims_last_for_a_step() -> None:
    s = slots(1)
    s.acquire("a")
    s.claim("b", at_once=True)
    assert not s.available("a")
    s.begin()
    assert s.available("a")


def test_eviction_waits_for_the_last_user() -> None:
    s = slots(1)
    s.acquire("a")
    assert not s.evict("a")
    s.release("a")
    assert s.evict("a")
    assert s.evict("a")
    assert s.resident == {}
    assert s.take_fills() == []
    with pytest.raises(KeyError):
        s.release("a")


def test_more_releases_than_acquisitions_are_an_error() -> None:
    s = slots(1)
    use(s, "a")
    with pytest.raises(RuntimeError):
        s.release("a")
