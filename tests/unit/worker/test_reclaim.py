"""When expired leases may be taken, and whether that is charged."""

from __future__ import annotations

import pytest
import redis

from worker import reclaim
from worker.reclaim import ReclaimRule


class Connection:
    def __init__(self) -> None:
        self.set_up = 0

    async def on_connect(self) -> None:
        self.set_up += 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    value = [100.0]
    monkeypatch.setattr(reclaim.time, "monotonic", lambda: value[0])
    return value


def pull(rule: ReclaimRule, lane: int, node: str = "") -> tuple[bool, bool]:
    lease = rule.lease(lane, node)
    rule.answered(lane, node, lease)
    return lease.reclaim, lease.charge


async def connect(rule: ReclaimRule, node: str = "") -> None:
    await rule.connected(Connection(), node)  # type: ignore[arg-type]


async def test_at_the_start_nothing_for_one_lease_and_then_charged(now: list[float]) -> None:
    rule = ReclaimRule(10.0, 3)
    await connect(rule)
    assert pull(rule, 0) == (False, True)
    now[0] += 9.9
    assert pull(rule, 0) == (False, True)
    now[0] += 0.2
    assert pull(rule, 0) == (True, True)
    assert rule.lease(0, "").lease_ms == 10_000 and rule.lease(0, "").max_attempts == 3


async def test_after_an_outage_nothing_for_one_lease_and_then_once_uncharged(now: list[float]) -> None:
    rule = ReclaimRule(10.0, 3)
    pull(rule, 0)
    now[0] += 20
    assert pull(rule, 0) == (True, True)
    rule.failed("")
    now[0] += 100
    assert pull(rule, 0)[0] is False, "the outage ends with this answer, not before"
    now[0] += 9
    assert pull(rule, 1)[0] is False
    now[0] += 2
    assert pull(rule, 0) == (True, False) and pull(rule, 1) == (True, False)
    assert pull(rule, 0) == (True, True) and pull(rule, 1) == (True, True)


async def test_a_silent_reconnect_fails_the_pull_that_it_was_made_for(now: list[float]) -> None:
    rule, connection = ReclaimRule(10.0, 3), Connection()
    await rule.connected(connection, "")  # type: ignore[arg-type]
    pull(rule, 0)
    now[0] += 20
    assert rule.lease(0, "").reclaim
    with pytest.raises(redis.ConnectionError):
        await rule.connected(connection, "")  # type: ignore[arg-type]
    rule.failed("")
    assert not rule.lease(0, "").reclaim
    await rule.connected(connection, "")  # type: ignore[arg-type]
    assert connection.set_up == 3 and pull(rule, 0)[0] is False


async def test_an_outage_of_one_node_is_that_of_its_lanes(now: list[float]) -> None:
    rule = ReclaimRule(10.0, 3)
    pull(rule, 0, "a"), pull(rule, 1, "b")
    now[0] += 20
    rule.failed("a")
    assert pull(rule, 0, "a")[0] is False and pull(rule, 1, "b") == (True, True)
    now[0] += 11
    assert pull(rule, 0, "a") == (True, False) and pull(rule, 1, "b") == (True, True)


async def test_a_failover_that_nobody_noticed_is_one(now: list[float]) -> None:
    """The pull that would have reclaimed was redirected to a node that there was no connection to."""
    rule = ReclaimRule(10.0, 3)
    await connect(rule, "a")
    pull(rule, 0, "a")
    now[0] += 20
    assert rule.lease(0, "a").reclaim
    with pytest.raises(redis.ConnectionError):
        await connect(rule, "replica")
    rule.failed("a")
    lease = rule.lease(0, "replica")
    assert not lease.reclaim
    await connect(rule, "replica")
    rule.answered(0, "replica", lease)
    now[0] += 11
    assert pull(rule, 0, "replica") == (True, False), "after an outage it is not charged"
    assert pull(rule, 0, "replica") == (True, True)


async def test_a_node_that_is_first_met_later_is_no_outage(now: list[float]) -> None:
    rule = ReclaimRule(10.0, 3)
    pull(rule, 0, "a")
    now[0] += 100
    await connect(rule, "b")
    assert pull(rule, 1, "b")[0] is False and pull(rule, 0, "a") == (True, True)
    now[0] += 11
    assert pull(rule, 1, "b") == (True, True)
