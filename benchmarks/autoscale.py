"""Days of bursty traffic against the rules by which a pool is scaled: what waits, what is paid, what is done twice.

    python -m benchmarks.autoscale [--quick] [--days 2] [--seed 0] [--json FILE]

No process is started: workers, queue and controllers are modelled second by second. A worker takes `SEQS` jobs at once,
a step takes longer the more it has, and it needs `START_S` from being wanted to its first job. A worker that is told to
go takes nothing more, has `GRACE_S` for what it runs and hands the rest back; whoever takes that up computes prompt and
answer so far again: `again`. Controllers are those of `benchmarks.scaling_rules`, the figure is the gateway's own.

Per setting: worker hours that are paid (starting and draining ones too), seconds from submit to start (median, 99 in
100, longest), wakes from zero, jobs handed over, and tokens computed again per thousand generated. The chart's defaults
are the first row, `CHART`; a test compares the two.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.scaling_rules import Autoscaler, Direction, Policy, Rules
from gateway.load import PoolLoad
from gateway.scaling import WorkerCapacity, needed_workers
from shared.jobs import LaneLoad

SEQS, START_S, GRACE_S = 16, 120, 30
#: Seconds of a step: fixed, and per sequence in it. Tokens of a prompt cost this share of a generated one.
STEP_S, STEP_SEQ_S, PROMPT_COST = 0.040, 0.0015, 0.02
MAX_TOKENS, MEAN_PROMPT = 2048, 500
#: Mean lengths of short and long answers, and how many are long.
SHORT_TOKENS, LONG_TOKENS, LONG_SHARE = 250, 1200, 0.1
#: Jobs per second at the height of the day, of a burst over that, and seconds that one lasts.
PEAK, BURST, BURST_S = 2.5, 2.5, 300
DAY_S = 86_400
TARGET_S = 10.0

#: Defaults of the chart's pools.
CHART = Rules(
    max_replicas=12,
    target=0.8,
    polling_s=10,
    cooldown_s=600,
    initial_cooldown_s=900,
    up=Direction(0, (Policy("Percent", 100, 30), Policy("Pods", 4, 30))),
    down=Direction(300, (Policy("Percent", 25, 60), Policy("Pods", 1, 60))),
    fallback=1,
)


@dataclass(slots=True)
class Job:
    """`work` is what is left in tokens to generate, prompt included at its price."""

    submitted: int
    prompt: int
    output: int
    work: float
    started: int = -1

    @property
    def cost(self) -> int:
        return self.prompt + MAX_TOKENS


@dataclass(slots=True)
class Worker:
    """Serves its jobs at one pace: a job ends when the pace's sum has grown by its work."""

    ready: int
    leaves: int | None = None
    pace: float = 0.0
    jobs: list[tuple[float, int, Job]] = field(default_factory=list)

    def step(self) -> list[Job]:
        """One second; answers jobs that ended."""
        if self.jobs:
            self.pace += 1 / (STEP_S + STEP_SEQ_S * len(self.jobs))
        ended = []
        while self.jobs and self.jobs[0][0] <= self.pace:
            ended.append(heapq.heappop(self.jobs)[2])
        return ended


@dataclass(slots=True)
class Outcome:
    """What a setting came to."""

    waits: list[int] = field(default_factory=list)
    worker_s: int = 0
    wakes: int = 0
    handed: int = 0
    again: int = 0
    generated: int = 0
    peak: int = 0

    def figures(self) -> dict[str, float]:
        """By name."""
        waits = sorted(self.waits)

        def at(share: float) -> float:
            return float(waits[min(len(waits) - 1, int(share * len(waits)))]) if waits else 0.0

        return {
            "worker_hours": self.worker_s / 3600,
            "wait_s_p50": at(0.5),
            "wait_s_p99": at(0.99),
            "wait_s_max": at(1.0),
            "wakes": self.wakes,
            "workers_max": self.peak,
            "handed_over": self.handed,
            "again_per_1000": 1000 * self.again / max(1, self.generated),
        }


#: The figure that a pool is scaled by.
Figure = Callable[[LaneLoad, float], float]


def needed(target_s: float) -> Figure:
    """`needed_workers` of the gateway."""
    capacity = WorkerCapacity(SEQS)
    return lambda load, run_s: needed_workers(load, run_s, capacity, target_s)


def jobs(load: LaneLoad, run_s: float) -> float:
    """Queued and running, in workers."""
    return (load.queued_jobs + load.running_jobs) / SEQS


def queued(load: LaneLoad, run_s: float) -> float:
    """Queued ones only, as a queue's length is often used."""
    return load.queued_jobs / SEQS


def traffic(days: float, seed: int) -> list[list[Job]]:
    """Jobs by second: nothing at night, most in the afternoon, and a burst every hour and a half or so."""
    rng = random.Random(seed)
    seconds, burst_until, next_burst = int(days * DAY_S), 0, rng.expovariate(1 / 5400)
    arrivals: list[list[Job]] = []
    for now in range(seconds):
        if now >= next_burst:
            burst_until, next_burst = now + BURST_S, now + rng.expovariate(1 / 5400)
        rate = max(0.0, -math.cos(2 * math.pi * (now % DAY_S) / DAY_S) + 0.3) / 1.3 * PEAK
        # One job or two now and then at night: each has to wake the pool.
        rate = max(rate * (BURST if now < burst_until else 1.0), 1 / 7200)
        arrivals.append([_job(rng, now) for _ in range(_poisson(rng, rate))])
    return arrivals


def _job(rng: random.Random, now: int) -> Job:
    prompt = int(rng.expovariate(1 / MEAN_PROMPT)) + 1
    mean = LONG_TOKENS if rng.random() < LONG_SHARE else SHORT_TOKENS
    output = min(MAX_TOKENS, int(rng.expovariate(1 / mean)) + 1)
    return Job(now, prompt, output, output + PROMPT_COST * prompt)


def _poisson(rng: random.Random, mean: float) -> int:
    """By Knuth's product of uniform numbers; means here are small."""
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


class Pool:
    """The pool, second by second."""

    def __init__(self, rules: Rules, figure: Figure, idle_first: bool = False) -> None:
        self._idle_first = idle_first
        self._scaler = Autoscaler(rules, replicas=0)
        self._figure, self._load = figure, PoolLoad()
        self._queue: deque[Job] = deque()
        self._workers: list[Worker] = []
        self._ended, self._number = 0, 0
        self.outcome = Outcome()

    def run(self, arrivals: list[list[Job]]) -> Outcome:
        """Until the last job of these seconds has ended."""
        now = 0
        while now < len(arrivals) or self._queue or any(worker.jobs for worker in self._workers):
            for job in arrivals[now] if now < len(arrivals) else ():
                self._queue.append(replace(job))
            self._second(now)
            now += 1
        self.outcome.wakes = self._scaler.wakes
        return self.outcome

    def _second(self, now: int) -> None:
        outcome = self.outcome
        for worker in self._workers:
            for job in worker.step():
                self._ended += job.cost
                outcome.generated += job.output
        self._take(now)
        load = self._counters()
        self._load.look(load, float(now + 1))
        wanted = self._scaler.tick(now, lambda: self._figure(load, self._load.run_s))
        self._resize(now, wanted)
        self._drain(now)
        outcome.worker_s += len(self._workers)
        outcome.peak = max(outcome.peak, len(self._workers))

    def _take(self, now: int) -> None:
        """Free places take what waits, the emptiest worker first."""
        if not self._queue:
            return
        takers = [w for w in self._workers if w.leaves is None and w.ready <= now and len(w.jobs) < SEQS]
        heap = [(len(worker.jobs), at) for at, worker in enumerate(takers)]
        heapq.heapify(heap)
        while self._queue and heap:
            held, at = heapq.heappop(heap)
            job, worker = self._queue.popleft(), takers[at]
            if job.started < 0:
                job.started = now
                self.outcome.waits.append(now - job.submitted)
            self._number += 1
            heapq.heappush(worker.jobs, (worker.pace + job.work, self._number, job))
            if held + 1 < SEQS:
                heapq.heappush(heap, (held + 1, at))

    def _counters(self) -> LaneLoad:
        running = [job for worker in self._workers for _, _, job in worker.jobs]
        return LaneLoad(
            len(self._queue),
            sum(job.cost for job in self._queue),
            len(running),
            sum(job.cost for job in running),
            0,
            self._ended,
        )

    def _resize(self, now: int, wanted: int) -> None:
        staying = [worker for worker in self._workers if worker.leaves is None]
        for _ in range(wanted - len(staying)):
            self._workers.append(Worker(now + START_S))
        # As a ReplicaSet does: those not ready first, then the cheapest to lose if somebody says so, then the youngest.
        order = sorted(staying, key=lambda w: (w.ready <= now, len(w.jobs) if self._idle_first else 0, -w.ready))
        for worker in order[: max(0, len(staying) - wanted)]:
            worker.leaves = now + GRACE_S

    def _drain(self, now: int) -> None:
        for worker in [w for w in self._workers if w.leaves is not None and (not w.jobs or now >= w.leaves)]:
            for end, _, job in sorted(worker.jobs, reverse=True):
                left = max(1.0, end - worker.pace)
                done = max(0, min(job.output - 1, int(job.output - left)))
                self.outcome.handed += 1
                self.outcome.again += job.prompt + done
                job.work = left + PROMPT_COST * (job.prompt + done)
                self._queue.appendleft(job)
            self._workers.remove(worker)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table."""

    name: str
    rules: Rules
    figure: Figure
    idle_first: bool = False


def settings() -> Iterator[Setting]:
    """Rows of the table: the chart's, then what differs from it."""
    at_once = (Policy("Percent", 100, 15),)
    hpa = replace(CHART, up=Rules(1).up, down=Rules(1).down)
    yield Setting("chart", CHART, needed(TARGET_S))
    yield Setting("target 1.0", replace(CHART, target=1.0), needed(TARGET_S))
    yield Setting("target 0.6", replace(CHART, target=0.6), needed(TARGET_S))
    yield Setting("target_s 60", CHART, needed(60))
    yield Setting("figure: jobs", CHART, jobs)
    yield Setting("figure: queued jobs only", CHART, queued)
    yield Setting("polling 30 s", replace(CHART, polling_s=30), needed(TARGET_S))
    yield Setting("cooldown 60 s", replace(CHART, cooldown_s=60), needed(TARGET_S))
    yield Setting("cooldown 3600 s", replace(CHART, cooldown_s=3600), needed(TARGET_S))
    yield Setting("window down 60 s", replace(CHART, down=replace(CHART.down, window_s=60)), needed(TARGET_S))
    yield Setting("window down 900 s", replace(CHART, down=replace(CHART.down, window_s=900)), needed(TARGET_S))
    yield Setting("no window, at once", replace(CHART, down=Direction(0, at_once)), needed(TARGET_S))
    yield Setting("policies of the HPA", hpa, needed(TARGET_S))
    yield Setting("at least 1", replace(CHART, min_replicas=1), needed(TARGET_S))
    yield Setting("idle workers go first", CHART, needed(TARGET_S), idle_first=True)
    yield Setting("always 12", replace(CHART, min_replicas=CHART.max_replicas), needed(TARGET_S))


def table(rows: dict[str, dict[str, float]]) -> Table:
    """For people."""
    shown = Table(title="benchmarks.autoscale")
    shown.add_column("setting")
    for name in next(iter(rows.values())):
        shown.add_column(name, justify="right")
    for setting, figures in rows.items():
        shown.add_row(setting, *(f"{value:,.1f}" if value % 1 else f"{value:,.0f}" for value in figures.values()))
    return shown


def main(
    quick: Annotated[bool, typer.Option(help="half a day")] = False,
    days: Annotated[float, typer.Option(help="days of traffic")] = 2.0,
    seed: Annotated[int, typer.Option(help="of the traffic")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Simulate and print."""
    began = time.perf_counter()
    arrivals = traffic(0.5 if quick else days, seed)
    rows = {s.name: Pool(s.rules, s.figure, s.idle_first).run(arrivals).figures() for s in settings()}
    console = Console(width=150)
    console.print(table(rows))
    count = sum(map(len, arrivals))
    console.print(
        f"{count:,} jobs in {len(arrivals) / DAY_S:g} days, seed {seed}; a worker takes {SEQS} jobs and starts in "
        f"{START_S} s; simulated in {time.perf_counter() - began:.0f} s",
        style="dim",
    )
    if json_file is not None:
        flat = {f"{name}: {figure}": value for name, row in rows.items() for figure, value in row.items()}
        json_file.write_text(json.dumps(flat, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    typer.run(main)
