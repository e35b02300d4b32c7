"""What goes wrong: each disturbance harms a victim, undoes it, and says which jobs it hit."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from shared.keys import JobId, job
from tests.support.chaos.adapters import ChaosAdapters
from tests.support.chaos.ear import Ear
from tests.support.chaos.fleet import ROOT, Fleet, Member
from tests.support.chaos.plan import Disturbance
from worker.pulse import EXIT_STALLED

#: Exit codes after SIGTERM: the second where it came before there was a handler, or once there is none any more.
_DRAINED = (0, -signal.SIGTERM)


@dataclass(frozen=True)
class Times:
    """Seconds, of the workers under fire."""

    lease_s: float
    grace_s: float
    step_timeout_s: float


@dataclass(slots=True)
class Hit:
    """A disturbance as it was.

    Attributes:
        at: monotonic seconds from which recovery counts: the kill, the end of a drain's grace period, the time-out of a
            step.
        held: jobs that the victim ran, by their epoch then.
        timed: nothing else was wrong.
        went_on: seconds from `at` until a job had its next token from another hand.
    """

    kind: str
    victim: str
    at: float
    held: dict[str, int] = field(default_factory=dict)
    timed: bool = False
    went_on: dict[str, float] = field(default_factory=dict)


class Weather:
    """Carries disturbances out. `client` goes straight to Redis, past every proxy."""

    def __init__(self, fleet: Fleet, client: Any, ear: Ear, times: Times, pool: str, adapters: ChaosAdapters) -> None:
        self._fleet, self._client, self._ear, self._times, self._pool = fleet, client, ear, times, pool
        self._adapters = adapters
        self._redis_lock = asyncio.Lock()
        self._kinds: dict[str, Callable[[Disturbance], Awaitable[Hit]]] = {
            "kill_worker": self._kill_worker,
            "pause_worker": self._pause_worker,
            "drain_worker": self._drain_worker,
            "hurry_worker": self._hurry_worker,
            "hang_engine": self._hang_engine,
            "kill_gateway": self._kill_gateway,
            "drain_gateway": self._drain_gateway,
            "kill_connections": self._kill_connections,
            "pause_network": self._pause_network,
            "cut_network": self._cut_network,
            "restart_redis": self._restart_redis,
            "freeze_redis": self._freeze_redis,
            "fill_redis": self._fill_redis,
            "pause_pool": self._pause_pool,
            "reload_adapter": self._reload_adapter,
            "unload_adapter": self._unload_adapter,
            "lose_store": self._lose_store,
        }

    async def strike(self, disturbance: Disturbance) -> Hit:
        """Do one; returns when the harm is undone or takes its course."""
        return await self._kinds[disturbance.kind](disturbance)

    def clear(self) -> None:
        """Undo what is not undone."""
        for member in self._fleet.members:
            member.signal(signal.SIGCONT)
            member.proxy.refuse = False
            member.proxy.go_on()

    # Workers

    async def _kill_worker(self, disturbance: Disturbance) -> Hit:
        worker, held = await self._worker(disturbance)
        worker.signal(signal.SIGKILL, -signal.SIGKILL)
        return Hit("kill_worker", worker.name, time.monotonic(), held)

    async def _pause_worker(self, disturbance: Disturbance) -> Hit:
        worker, held = await self._worker(disturbance)
        hit = Hit("pause_worker", worker.name, time.monotonic(), held)
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(self._times.lease_s * (1.3 + disturbance.seconds))
        worker.signal(signal.SIGCONT)
        return hit

    async def _drain_worker(self, disturbance: Disturbance) -> Hit:
        worker, held = await self._worker(disturbance)
        worker.signal(signal.SIGTERM, *_DRAINED)
        return Hit("drain_worker", worker.name, time.monotonic() + self._times.grace_s, held)

    async def _hurry_worker(self, disturbance: Disturbance) -> Hit:
        worker, held = await self._worker(disturbance)
        worker.signal(signal.SIGTERM, *_DRAINED)
        await asyncio.sleep(self._times.grace_s * disturbance.seconds)
        worker.signal(signal.SIGTERM, *_DRAINED)
        return Hit("hurry_worker", worker.name, time.monotonic(), held)

    async def _hang_engine(self, disturbance: Disturbance) -> Hit:
        worker, held = await self._worker(disturbance)
        # Before it has installed its handler, the signal ends it.
        worker.signal(signal.SIGUSR1, EXIT_STALLED, -signal.SIGUSR1)
        return Hit("hang_engine", worker.name, time.monotonic() + self._times.step_timeout_s, held)

    async def _worker(self, disturbance: Disturbance) -> tuple[Member, dict[str, int]]:
        """A worker that lives, one with jobs if there is any, and its jobs."""
        living = _rotated([w for w in self._fleet.workers if w.alive and not w.paused], disturbance.victim)
        held = await self._held()
        for worker in living:
            if mine := held.get(worker.owner or "-"):
                return worker, mine
        return (living or self._fleet.workers)[0], {}

    async def _held(self) -> dict[str, dict[str, int]]:
        """By owner: jobs that have begun, with their epochs. Empty while Redis is away."""
        live = self._ear.live
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for job_id in live:
                    pipe.hmget(job(JobId.parse(job_id)), "owner", "epoch", "status")
                answers = await pipe.execute()
        except (redis.RedisError, OSError):
            return {}
        held: dict[str, dict[str, int]] = {}
        for job_id, (owner, epoch, status) in zip(live, answers, strict=True):
            if status == b"running":
                held.setdefault(owner.decode(), {})[job_id] = int(epoch)
        return held

    # Gateways

    async def _kill_gateway(self, disturbance: Disturbance) -> Hit:
        gateway = _rotated(self._fleet.gateways, disturbance.victim)[0]
        gateway.signal(signal.SIGKILL, -signal.SIGKILL)
        return Hit("kill_gateway", gateway.name, time.monotonic())

    async def _drain_gateway(self, disturbance: Disturbance) -> Hit:
        gateway = _rotated(self._fleet.gateways, disturbance.victim)[0]
        gateway.signal(signal.SIGTERM, *_DRAINED)
        return Hit("drain_gateway", gateway.name, time.monotonic())

    # Redis and the way to it

    async def _kill_connections(self, disturbance: Disturbance) -> Hit:
        kinds = ("pubsub", "normal") if disturbance.seconds < 0.5 else ("normal", "pubsub")
        hit = Hit("kill_connections", kinds[0], time.monotonic())
        with contextlib.suppress(redis.RedisError, OSError):  # Redis is away: there are none
            await self._client.client_kill_filter(_type=kinds[0], skipme=True)
        return hit

    async def _pause_network(self, disturbance: Disturbance) -> Hit:
        member = _rotated(self._fleet.members, disturbance.victim)[0]
        hit = Hit("pause_network", member.name, time.monotonic())
        member.proxy.hold(requests=True)
        await asyncio.sleep(0.2 + 2 * self._times.lease_s * disturbance.seconds)
        member.proxy.go_on()
        return hit

    async def _cut_network(self, disturbance: Disturbance) -> Hit:
        member = _rotated(self._fleet.members, disturbance.victim)[0]
        hit = Hit("cut_network", member.name, time.monotonic())
        member.proxy.refuse = True
        member.proxy.cut()
        await asyncio.sleep(2 * self._times.lease_s * disturbance.seconds)
        member.proxy.refuse = False
        return hit

    async def _restart_redis(self, disturbance: Disturbance) -> Hit:
        async with self._redis_lock:
            hit = Hit("restart_redis", "redis", time.monotonic())
            await self._fleet.restart_redis(3 * self._times.lease_s * disturbance.seconds)
        return hit

    async def _freeze_redis(self, disturbance: Disturbance) -> Hit:
        async with self._redis_lock:
            hit = Hit("freeze_redis", "redis", time.monotonic())
            with self._fleet.redis.frozen():
                await asyncio.sleep(3 * self._times.lease_s * disturbance.seconds)
        return hit

    async def _fill_redis(self, disturbance: Disturbance) -> Hit:
        async with self._redis_lock:
            hit = Hit("fill_redis", "redis", time.monotonic())
            await self._client.config_set("maxmemory", "1mb")
            await asyncio.sleep(3 * self._times.lease_s * disturbance.seconds)
            await self._client.config_set("maxmemory", 0)
        return hit

    # The pool

    async def _pause_pool(self, disturbance: Disturbance) -> Hit:
        hit = Hit("pause_pool", self._pool, time.monotonic())
        await self._command("pool", "pause", self._pool)
        await asyncio.sleep(2 * self._times.lease_s * disturbance.seconds)
        await self._command("pool", "unpause", self._pool)
        return hit

    # Adapters

    async def _reload_adapter(self, disturbance: Disturbance) -> Hit:
        name = self._adapters.chosen(disturbance.victim)
        hit = Hit("reload_adapter", name, time.monotonic())
        await self._adapters.reload(name)
        return hit

    async def _unload_adapter(self, disturbance: Disturbance) -> Hit:
        name = self._adapters.chosen(disturbance.victim)
        hit = Hit("unload_adapter", name, time.monotonic())
        await self._adapters.unload(name, 2 * self._times.lease_s * disturbance.seconds)
        return hit

    async def _lose_store(self, disturbance: Disturbance) -> Hit:
        hit = Hit("lose_store", "store", time.monotonic())
        async with self._adapters.store_away():
            await asyncio.sleep(3 * self._times.lease_s * disturbance.seconds)
        return hit

    async def _command(self, *words: str) -> None:
        """An operator's command, given again until it succeeds: Redis may be away."""
        command = [sys.executable, "-m", "ropeway", *words, "--redis", self._fleet.redis.url]
        while True:
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL)
            if await process.wait() == 0:
                return


def _rotated(members: Sequence[Member], victim: float) -> list[Member]:
    first = int(victim * len(members))
    return [*members[first:], *members[:first]]
