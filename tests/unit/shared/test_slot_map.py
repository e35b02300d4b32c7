"""Which node serves a slot, as nodes told."""

from __future__ import annotations

import pytest
from redis.crc import key_slot

from shared import slot_map
from shared.redis_url import Address
from shared.slot_map import ASK_EVERY_S, SlotMap

A, B, C = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    value = [100.0]
    monkeypatch.setattr(slot_map.time, "monotonic", lambda: value[0])
    return value


def node(address: Address) -> list[object]:
    return [address[0].encode(), address[1], b"id", []]


def answer(*ranges: tuple[int, int, Address]) -> list[object]:
    return [[start, end, node(primary), node(C)] for start, end, primary in ranges]


def key_in(first: int, last: int) -> str:
    return next(f"k{n}" for n in range(100_000) if first <= key_slot(f"k{n}".encode()) <= last)


def test_slots_belong_to_their_ranges() -> None:
    slots = SlotMap([A])
    assert slots.primary("k") is None and not slots.known
    assert slots.learn(answer((8000, 16000, B), (0, 7999, A)), A)
    assert slots.primary(key_in(0, 7999)) == A and slots.primary(key_in(8000, 16000)) == B
    assert slots.primary(key_in(16001, 16383)) is None, "nobody serves the rest"
    assert slots.nodes == [A, B, C] and slots.primaries == [A, B]
    assert slots.primary("rw:{pool.3}:x") == slots.primary("rw:{pool.3}:y")


def test_a_node_that_does_not_know_its_own_name_is_the_one_that_was_asked() -> None:
    slots = SlotMap([A])
    slots.learn([[0, 16383, [b"", 7, b"id", []]]], A)
    assert slots.primary("k") == (A[0], 7)


def test_a_server_without_a_cluster_teaches_nothing() -> None:
    slots = SlotMap([A])
    assert not slots.learn([], A) and not slots.known


def test_it_is_asked_when_something_is_wrong_and_not_all_the_time(now: list[float]) -> None:
    slots = SlotMap([A])
    assert slots.must_ask()
    slots.candidates()
    assert slots.must_ask(), "as long as nothing is known"
    slots.learn(answer((0, 16383, A)), A)
    assert not slots.must_ask()
    slots.failed(A)
    assert not slots.must_ask(), "it was asked just now"
    now[0] += 2 * ASK_EVERY_S
    assert slots.must_ask()
    slots.candidates()
    assert not slots.must_ask()
    now[0] += 2 * ASK_EVERY_S
    assert slots.must_ask(), "nobody answered"
    slots.learn(answer((0, 16383, A)), A)
    now[0] += 1000
    assert not slots.must_ask()


def test_a_slot_that_has_moved_is_known_until_the_next_answer(now: list[float]) -> None:
    slots = SlotMap([A])
    slots.learn(answer((0, 16383, A)), A)
    slots.moved(key_slot(b"k"), B)
    assert slots.primary("k") == B
    now[0] += 2 * ASK_EVERY_S
    assert slots.must_ask()
    slots.learn(answer((0, 16383, A)), A)
    assert slots.primary("k") == A


def test_the_node_that_failed_is_asked_last_and_seeds_are_never_forgotten() -> None:
    slots = SlotMap([("seed", 9)])
    assert slots.candidates() == [("seed", 9)]
    slots.learn(answer((0, 16383, A)), A)
    slots.failed(A)
    for _ in range(20):
        assert slots.candidates() == [C, ("seed", 9), A]
