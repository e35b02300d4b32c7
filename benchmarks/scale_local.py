"""The cluster on one machine: a gateway, Redis, and 0 to 6 workers that come and go by the chart's rules.

    python -m benchmarks.scale_local [--quick] [--json FILE]

Real processes with the simulated engine. What KEDA, the pod autoscaler and the ReplicaSet do is done here, by
`benchmarks.scaling_rules` on the figure that the gateway answers over HTTP, with all times of the chart divided by
`SPEED`: it asks, starts workers and sends SIGTERM to the youngest. In the beginning no worker has ever been there; one
is started for the pool's card and sent to sleep. Then one stream wakes the pool, a burst follows, and long streams go
on while the pool shrinks. All ask for the same with the same seed, so all must bring the same text as far as they go.

    wake_s            from a request to its first token, with no worker there
    replicas_max      of the burst
    drained, moved    workers that were told to go, and jobs that they had then
    streams, cut      cut: ended otherwise than with their last token
    different         streams whose text is another one
    asleep            1 if no worker is left in the end
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.autoscale import CHART
from benchmarks.scaling_rules import Autoscaler, Direction, FigureError, Rules
from tests.support.stack import Process, Stack

POOL, SEQS, STEP_MS = "sim", 8, 20.0
SPEED = 60
#: Seconds of the chart's `drainSeconds`, sped up likewise.
GRACE_S = 0.5
KEY, CLIENT_KEY = "autoscaler", "client"
#: Between two looks of this stand-in at its processes.
TICK_S = 0.05
#: Seconds that anything may take before it counts as failed.
PATIENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked: streams of the burst with their tokens, and long ones that outlive it."""

    workers: int = 6
    burst: int = 60
    burst_tokens: int = 120
    long: int = 12
    long_tokens: int = 1500


@dataclass(slots=True)
class Moment:
    """One line of the table."""

    at: float
    wanted: int
    processes: int
    load: dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    moments: list[Moment] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def sped_up(rules: Rules, workers: int) -> Rules:
    """The chart's rules with all times divided by `SPEED`."""

    def faster(direction: Direction) -> Direction:
        policies = tuple(replace(p, period_s=p.period_s / SPEED) for p in direction.policies)  # type: ignore[arg-type]
        return Direction(direction.window_s / SPEED, policies)  # type: ignore[arg-type]

    return replace(
        rules,
        max_replicas=workers,
        polling_s=rules.polling_s / SPEED,
        cooldown_s=rules.cooldown_s / SPEED,
        initial_cooldown_s=rules.initial_cooldown_s / SPEED,
        sync_s=rules.sync_s / SPEED,
        up=faster(rules.up),
        down=faster(rules.down),
    )


class Cluster:
    """Stands in for the controllers."""

    def __init__(self, stack: Stack, workers: int, outcome: Outcome) -> None:
        self._stack, self._outcome = stack, outcome
        self._rules = sped_up(CHART, workers)
        self._staying: list[Process] = []
        self._leaving: list[Process] = []
        self.gone: list[Process] = []
        self.began = time.monotonic()

    @property
    def workers(self) -> int:
        """Processes that have not ended, draining ones too."""
        return len(self._staying) + len(self._leaving)

    async def run(self) -> None:
        """Until cancelled."""
        # A Deployment without replicas begins with one.
        scaler = Autoscaler(self._rules, replicas=1)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=self._stack.url, headers=headers, timeout=5) as http:
            while True:
                state = await self._ask(http)
                wanted = scaler.tick(time.monotonic() - self.began, _figure(state))
                self._resize(wanted)
                self._note(wanted, state)
                await asyncio.sleep(TICK_S)

    async def _ask(self, http: httpx.AsyncClient) -> dict[str, Any] | None:
        try:
            answer = await http.get(f"/v1/pools/{POOL}/load", params={"jobs_per_worker": SEQS})
        except httpx.TransportError:
            return None
        return dict(answer.json()) if answer.status_code == 200 else None

    def _resize(self, wanted: int) -> None:
        for process in [p for p in self._leaving if p.popen.poll() is not None]:
            self._leaving.remove(process)
            self.gone.append(process)
        dead = [process.text()[-2000:] for process in self._staying if process.popen.poll() is not None]
        if dead:
            raise RuntimeError(f"a worker ended by itself:\n{dead[0]}")
        while len(self._staying) < wanted:
            self._staying.append(self._stack.start_worker()[0])
        while len(self._staying) > wanted:
            process = self._staying.pop()
            process.popen.terminate()
            self._leaving.append(process)

    def _note(self, wanted: int, state: dict[str, Any] | None) -> None:
        moments, load = self._outcome.moments, state or {}
        if moments and (moments[-1].wanted, moments[-1].processes) == (wanted, self.workers):
            return
        moments.append(Moment(time.monotonic() - self.began, wanted, self.workers, load))


def _figure(state: dict[str, Any] | None) -> Callable[[], float]:
    def read() -> float:
        if state is None:
            raise FigureError
        return float(state["needed_workers"])

    return read


@dataclass(slots=True)
class Stream:
    """A client's view of one stream."""

    text: str = ""
    finish: str | None = None
    tokens: int = 0
    first_s: float | None = None

    @property
    def whole(self) -> bool:
        return self.finish == "length"


async def stream(http: httpx.AsyncClient, tokens: int) -> Stream:
    """Ask for so many tokens and read to the end."""
    body = {
        "model": POOL, "prompt": "A cable car", "max_tokens": tokens, "seed": 7, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    seen, began = Stream(), time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", []):
                if choice["text"] and seen.first_s is None:
                    seen.first_s = time.perf_counter() - began
                seen.text += choice["text"]
                seen.finish = choice["finish_reason"] or seen.finish
            seen.tokens = (event.get("usage") or {}).get("completion_tokens", seen.tokens)
    return seen


async def until(what: str, check: Callable[[], bool]) -> None:
    """Wait for something to become so. Raises RuntimeError where that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {PATIENCE_S:.0f} s")
        await asyncio.sleep(TICK_S)


async def play(stack: Stack, plan: Plan) -> Outcome:
    """The whole story."""
    outcome = Outcome()
    cluster = Cluster(stack, plan.workers, outcome)
    control = asyncio.create_task(cluster.run())
    story = asyncio.create_task(_story(stack, plan, cluster, outcome))
    try:
        await asyncio.wait({control, story}, return_when=asyncio.FIRST_COMPLETED)
        if control.done():
            control.result()
        await story
    finally:
        for task in (control, story):
            task.cancel()
        await asyncio.gather(control, story, return_exceptions=True)
    return outcome


async def _story(stack: Stack, plan: Plan, cluster: Cluster, outcome: Outcome) -> None:
    limits, headers = httpx.Limits(max_connections=None), {"authorization": f"Bearer {CLIENT_KEY}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=PATIENCE_S, limits=limits) as http:
        await until("the first worker", lambda: cluster.workers == 1)
        await until("the pool's card", lambda: any(m.load.get("known") for m in outcome.moments) or _known(stack))
        await until("sleep after the first worker", lambda: cluster.workers == 0)
        alone = await stream(http, 10)
        streams = []
        # The long ones last, so that they are spread over all workers that the burst has made.
        for tokens in [plan.burst_tokens] * plan.burst + [plan.long_tokens] * plan.long:
            streams.append(asyncio.create_task(stream(http, tokens)))
            await asyncio.sleep(0.02)
        seen = await asyncio.gather(*streams)
        await until("sleep after the burst", lambda: cluster.workers == 0)
    moved = [int(n) for process in cluster.gone for n in re.findall(r'"jobs": ?(\d+), "grace_s"', process.text())]
    whole = [*seen, alone]
    longest = max((one.text for one in whole), key=len)
    outcome.figures = {
        "wake_s": alone.first_s or 0.0,
        "replicas_max": max(moment.wanted for moment in outcome.moments),
        "drained": len(cluster.gone),
        "moved": sum(moved),
        "streams": len(whole),
        "cut": sum(not one.whole for one in whole),
        "different": sum(not longest.startswith(one.text) for one in whole),
        "asleep": float(cluster.workers == 0),
    }


def _known(stack: Stack) -> bool:
    try:
        answer = httpx.get(f"{stack.url}/v1/pools/{POOL}/load", headers={"authorization": f"Bearer {KEY}"}, timeout=5)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and bool(answer.json()["known"])


def run(plan: Plan) -> Outcome:
    """Start everything, play, stop everything."""
    settings = {"engine": "sim", "sim_step_ms": STEP_MS, "max_num_seqs": SEQS, "lanes": 4, "grace_s": GRACE_S}
    with Stack(**settings, heartbeat_s=0.5, clean=True) as stack:  # type: ignore[arg-type]
        stack.start_gateway(pools=[POOL], metrics_key=KEY, api_keys=[CLIENT_KEY])
        stack.wait_ready()
        return asyncio.run(play(stack, plan))


def main(
    quick: Annotated[bool, typer.Option(help="fewer and shorter streams")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Play and print."""
    from benchmarks.common import report

    outcome = run(Plan(burst=30, long=8, long_tokens=1000) if quick else Plan())
    print(f"{'s':>6} {'wanted':>7} {'processes':>10} {'queued':>7} {'running':>8} {'needed':>7}")
    for moment in outcome.moments:
        load = moment.load
        print(
            f"{moment.at:6.1f} {moment.wanted:7} {moment.processes:10} {load.get('queued_jobs', '-'):>7} "
            f"{load.get('running_jobs', '-'):>8} {load.get('needed_workers', '-'):>7}"
        )
    report("scale_local", outcome.figures, dtype="sim", model="SimEngine", json_file=json_file)


if __name__ == "__main__":
    typer.run(main)
