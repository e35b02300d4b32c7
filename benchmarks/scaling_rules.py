"""What KEDA and the horizontal pod autoscaler do with a figure, as their documentation and sources say.

KEDA asks every `polling_s` and decides between nothing and something: active is a figure above `activation`; after
`cooldown_s` without activity a pool without a minimum goes to zero. An error neither wakes nor sends to sleep, until
`failures` of them make KEDA answer with `fallback` replicas. Above zero the pod autoscaler decides, every `sync_s`:
ceil(figure / target), nothing within `tolerance`, then stabilisation windows, then policies, then the bounds
(kubernetes.io, Horizontal Pod Autoscaling, "Algorithm details" and "Configurable scaling behavior").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


class FigureError(Exception):
    """The figure cannot be had."""


@dataclass(frozen=True, slots=True)
class Policy:
    """At most so many pods, or per cent of them, in a period."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: int


@dataclass(frozen=True, slots=True)
class Direction:
    """Of several policies the one that changes most counts, as is the default."""

    window_s: int
    policies: tuple[Policy, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """One pool's scaling."""

    max_replicas: int
    min_replicas: int = 0
    target: float = 1.0
    activation: float = 0.0
    polling_s: float = 30.0
    cooldown_s: float = 300.0
    initial_cooldown_s: float = 0.0
    up: Direction = Direction(0, (Policy("Percent", 100, 15), Policy("Pods", 4, 15)))
    down: Direction = Direction(300, (Policy("Percent", 100, 15),))
    failures: int = 3
    fallback: int | None = None
    sync_s: float = 15.0
    tolerance: float = 0.1


@dataclass(slots=True)
class Autoscaler:
    """One pool's replicas over time. `tick` as often as time passes; seconds of any clock that starts near 0."""

    rules: Rules
    replicas: int = 1
    wakes: int = 0
    _active_at: float | None = None
    _polled: float = -math.inf
    _synced: float = -math.inf
    _failed: int = 0
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def tick(self, now: float, figure: Callable[[], float]) -> int:
        """The replicas that are wanted from now on."""
        if now - self._polled >= self.rules.polling_s:
            self._polled = now
            self._poll(now, figure)
        if self.replicas > 0 and now - self._synced >= self.rules.sync_s:
            self._synced = now
            self._sync(now, figure)
        return self.replicas

    def _read(self, figure: Callable[[], float]) -> tuple[float, bool] | None:
        """The figure, and whether it stands for a fallback; None if it cannot be had."""
        rules = self.rules
        try:
            value = figure()
        except FigureError:
            self._failed += 1
            if rules.fallback is None or self._failed <= rules.failures:
                return None
            return rules.target * max(rules.fallback, self.replicas), True
        self._failed = 0
        return value, False

    def _poll(self, now: float, figure: Callable[[], float]) -> None:
        rules, read = self.rules, self._read(figure)
        if read is None:
            return
        value, fallback = read
        if fallback or value > rules.activation:
            if self.replicas == 0:
                self._set(now, max(1, rules.min_replicas))
                self.wakes += 1
            self._active_at = now
        elif self.replicas > 0 and rules.min_replicas == 0 and self._cooled(now):
            self._set(now, 0)
            self._recommended.clear()
        elif self.replicas < rules.min_replicas:
            self._set(now, rules.min_replicas)

    def _cooled(self, now: float) -> bool:
        if self._active_at is None:
            return now >= self.rules.initial_cooldown_s
        return now - self._active_at > self.rules.cooldown_s

    def _sync(self, now: float, figure: Callable[[], float]) -> None:
        rules, read = self.rules, self._read(figure)
        if read is None:
            return
        wanted = self._stabilised(now, desired(read[0], rules.target, self.replicas, rules.tolerance))
        wanted = self._limited(now, wanted)
        wanted = min(max(wanted, rules.min_replicas, 1), rules.max_replicas)
        if wanted != self.replicas:
            self._set(now, wanted)

    def _stabilised(self, now: float, wanted: int) -> int:
        """No more than was wanted at any time in the window up, no less than in the window down."""
        up, down = self.rules.up.window_s, self.rules.down.window_s
        seen = [(at, n) for at, n in self._recommended if now - at <= max(up, down)]
        self._recommended = [*seen, (now, wanted)]
        least = min([n for at, n in seen if now - at < up], default=wanted)
        most = max([n for at, n in seen if now - at < down], default=wanted)
        return min(max(self.replicas, min(least, wanted)), max(most, wanted))

    def _limited(self, now: float, wanted: int) -> int:
        if wanted > self.replicas:
            return min(wanted, max(self._bound(now, p, +1) for p in self.rules.up.policies))
        if wanted < self.replicas:
            return max(wanted, min(self._bound(now, p, -1) for p in self.rules.down.policies))
        return wanted

    def _bound(self, now: float, policy: Policy, sign: int) -> int:
        """How far one policy lets the number go, from where it was at the period's begin."""
        begin = self.replicas - sum(change for at, change in self._changes if now - at < policy.period_s)
        if policy.kind == "Pods":
            return begin + sign * policy.value
        share = begin * (1 + sign * policy.value / 100)
        return math.ceil(share) if sign > 0 else math.floor(share)

    def _set(self, now: float, replicas: int) -> None:
        self._changes = [(at, change) for at, change in self._changes if now - at < 1800]
        self._changes.append((now, replicas - self.replicas))
        self.replicas = replicas


def desired(figure: float, target: float, replicas: int, tolerance: float) -> int:
    """Replicas for an `AverageValue` target: the figure is a sum over all pods."""
    if replicas > 0 and abs(figure / (target * replicas) - 1) <= tolerance:
        return replicas
    return math.ceil(round(figure / target, 6))
