"""The arithmetic of the controllers, by the examples of their documentation and by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.scaling_rules import Autoscaler, Direction, FigureError, Policy, Rules, desired

FAST = Direction(0, (Policy("Percent", 900, 15),))


def rules(**changes: object) -> Rules:
    base: dict[str, object] = {"max_replicas": 10, "up": FAST, "polling_s": 10}
    return Rules(**(base | changes))  # type: ignore[arg-type]


def run(scaler: Autoscaler, figure: Callable[[float], float], until: int, since: int = 0) -> dict[int, int]:
    """Replicas at each second."""

    def at(now: int) -> Callable[[], float]:
        return lambda: figure(now)

    return {now: scaler.tick(now, at(now)) for now in range(since, until)}


@pytest.mark.parametrize(
    ("figure", "target", "replicas", "expected"),
    [(200, 100, 1, 2), (50, 100, 1, 1), (2.05, 1, 2, 2), (2.3, 1, 2, 3), (1.79, 1, 2, 2), (0.0, 1, 3, 0)],
)
def test_desired(figure: float, target: float, replicas: int, expected: int) -> None:
    assert desired(figure, target, replicas, 0.1) == expected


def test_one_job_wakes_and_silence_sends_to_sleep_after_the_cooldown() -> None:
    scaler = Autoscaler(rules(cooldown_s=60), replicas=0)
    assert set(run(scaler, lambda now: 0.0, 30).values()) == {0}
    seen = run(scaler, lambda now: 0.015 if now < 100 else 0.0, 300, since=30)
    assert seen[30] == 1 and scaler.wakes == 1
    asleep = next(now for now in range(100, 300) if seen[now] == 0)
    assert 150 <= asleep <= 170


def test_a_new_pool_keeps_its_first_worker_while_that_reads_its_model() -> None:
    assert run(Autoscaler(rules()), lambda now: 0.0, 60)[0] == 0
    assert run(Autoscaler(rules(initial_cooldown_s=600)), lambda now: 0.0, 60)[59] == 1


def test_the_highest_recommendation_of_the_window_counts_on_the_way_down() -> None:
    scaler = Autoscaler(rules(down=Direction(120, (Policy("Percent", 100, 15),))))
    seen = run(scaler, lambda now: 6.0 if now < 60 else 2.0, 300)
    assert seen[60] == seen[150] == 6 and seen[299] == 2


def test_policies_bound_the_speed() -> None:
    up = Autoscaler(rules(up=Direction(0, (Policy("Percent", 100, 60), Policy("Pods", 2, 60)))))
    seen = run(up, lambda now: 10.0, 180)
    assert [seen[0], seen[59], seen[60], seen[120]] == [3, 3, 6, 10]
    down = Autoscaler(rules(down=Direction(0, (Policy("Pods", 1, 60),))), replicas=4)
    falling = run(down, lambda now: 0.5, 240)
    assert [falling[0], falling[59], falling[60], falling[120], falling[239]] == [3, 3, 2, 1, 1]


def test_an_error_changes_nothing_and_then_falls_back() -> None:
    def broken(now: float) -> float:
        raise FigureError

    held = Autoscaler(rules(cooldown_s=10), replicas=3)
    assert set(run(held, broken, 600).values()) == {3}
    asleep = Autoscaler(rules(fallback=1), replicas=0)
    seen = run(asleep, broken, 600)
    assert seen[0] == 0 and seen[599] == 1
    large = Autoscaler(rules(fallback=1), replicas=5)
    assert set(run(large, broken, 600).values()) == {5}, "the fallback takes nothing away"
