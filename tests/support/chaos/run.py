"""One run: a fleet, clients, disturbances, and then the judge."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from shared.connect import connect
from shared.errors import JobNotFoundError
from shared.jobstore import JobStore
from shared.protocol import ChoiceResult, Envelope, Frame, Result, decode
from shared.upkeep import Upkeep
from tests.support.chaos import aftermath
from tests.support.chaos.adapters import ChaosAdapters
from tests.support.chaos.clients import READ_S, ChaosClient
from tests.support.chaos.disturbances import Hit, Times, Weather
from tests.support.chaos.ear import Ear
from tests.support.chaos.fleet import Fleet
from tests.support.chaos.judge import KINDS, Evidence, Fault, judge_adapter, judge_job, judge_witness
from tests.support.chaos.plan import Disturbance, Order, Plan, draw_plan
from tests.support.chaos.witness import Witness
from tests.support.worker_harness import expected

MODEL = "smollm2-135m-instruct"
#: Seconds that a timed disturbance is watched until everything goes on.
_WATCH_S = 60.0
#: Jobs are killed here by chance, not for what they ask: none is to be given up for it.
_MAX_ATTEMPTS = 1000

#: What an undisturbed run gives for an order; None where that is not known.
Reference = Callable[[Order | None, Envelope], list[ChoiceResult] | None]


@dataclass(frozen=True)
class Config:
    """A run.

    Attributes:
        kinds: of disturbances; empty for all.
        clients: orders under way at the same time.
        tokens: shortest and longest answer.
        step_ms: of the simulated engine.
        patience_s: longest time without anything new until a client gives up.
        alone: share of kills and drains that are timed, with nothing else wrong.
        dtype: of a model's weights and KV cache.
        adapters: how many names of adapters there are. A model's stand for the same content all the time: the
            undisturbed run could not know when they changed.
    """

    seed: int = 0
    jobs: int = 1000
    disturbances: int = 100
    kinds: tuple[str, ...] = ()
    engine: Literal["sim", "model"] = "sim"
    deterministic: bool = False
    dtype: str = "auto"
    workers: int = 3
    gateways: int = 2
    clients: int = 12
    adapters: int = 16
    tokens: tuple[int, int] = (40, 200)
    step_ms: float = 25.0
    lanes: int = 8
    lease_s: float = 2.0
    grace_s: float = 0.5
    step_timeout_s: float = 2.0
    patience_s: float = 120.0
    alone: float = 1 / 3
    # Each write is the kernel's before its answer goes out, so a killed Redis has lost nothing. With `everysec` that is
    # not so while an fsync takes longer than a second, as on a busy disk.
    appendfsync: str = "no"
    keep_logs: bool = False

    @property
    def pool(self) -> str:
        """The model's name and the pool's."""
        return "sim" if self.engine == "sim" else MODEL


@dataclass
class Report:
    """What came of a run.

    Attributes:
        recoveries: seconds until a job that was hit went on, by kind of disturbance.
        timed: the same where nothing else was wrong.
        matches: of completed jobs whose undisturbed answer is known: whether a second worker took it up, and whether
            tokens, texts and ends are the same.
        leftovers: what is not in order in Redis.
        crashes: processes that ended though nobody had asked them to.
        began, seconds: when clients and disturbances did, and how long they took.
    """

    config: Config
    jobs: int = 0
    hits: list[Hit] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    timed: dict[str, list[float]] = field(default_factory=dict)
    matches: list[tuple[bool, bool]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    began: float = 0.0
    seconds: float = 0.0
    results: dict[int, list[ChoiceResult]] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the benchmark."""
        faults = Counter(fault.kind for fault in self.faults)
        drains = [*self.timed.get("drain_worker", []), *self.timed.get("hurry_worker", [])]
        return {
            "jobs": self.jobs,
            "disturbances": len(self.hits),
            "lost": faults["lost"],
            "gaps": faults["gap"],
            "repeats": faults["repeat"] + faults["disorder"],
            "fenced_seen": faults["fenced"],
            "different": faults["different"],
            "match_rate": _share(same for _, same in self.matches),
            "resumed": sum(resumed for resumed, _ in self.matches),
            "resumed_match_rate": _share(same for resumed, same in self.matches if resumed),
            "resume_s_max": max(self.timed.get("kill_worker", []), default=0.0),
            "drain_s_max": max(drains, default=0.0),
            "leftovers": len(self.leftovers),
            "crashes": len(self.crashes),
            "seconds": self.seconds,
        }

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; without deterministic mode a real model may give another text after a take-over."""
        may_differ = self.config.engine == "model" and not self.config.deterministic
        faults = [fault for fault in self.faults if not (may_differ and fault.kind == "different")]
        return not (faults or self.leftovers or self.crashes)


def plan_of(config: Config) -> Plan:
    """The orders and disturbances of a run."""
    return draw_plan(
        config.seed,
        jobs=config.jobs,
        disturbances=config.disturbances,
        tokens=config.tokens,
        model=config.pool,
        kinds=config.kinds,
        alone=config.alone,
        unseeded=0.1 if config.engine == "sim" else 0.0,
        adapters=config.adapters,
        renamed=config.engine == "sim",
    )


def _settings(config: Config, store: Path) -> tuple[dict[str, object], dict[str, object]]:
    """Of workers and of gateways."""
    worker: dict[str, object] = {
        "engine": "sim" if config.engine == "sim" else "auto",
        "model": MODEL,
        "pool": config.pool,
        "deterministic": config.deterministic,
        "lanes": config.lanes,
        "sim_step_ms": config.step_ms,
        "max_num_seqs": 16,
        "lease_s": config.lease_s,
        "grace_s": config.grace_s,
        "step_timeout_s": config.step_timeout_s,
        "max_attempts": _MAX_ATTEMPTS,
        "heartbeat_s": 0.5,
        "adapter_store": str(store),
        "log_json": True,
    }
    if config.engine == "model":
        worker |= {"dtype": config.dtype, "threads": 1, "kv_cache_memory_mb": 256}
    if config.adapters:
        # Few slots and little memory, so that both change hands all the time.
        worker |= {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 5, "sim_adapter_load_ms": 20}
    gateway: dict[str, object] = {"sweep_s": 2, "keepalive_s": 2, "adapter_store": str(store), "log_json": True}
    return worker, gateway


async def run(config: Config, plan: Plan, reference: Reference | None = None) -> Report:
    """Run a plan and judge it."""
    report = Report(config)
    with tempfile.TemporaryDirectory(prefix="rw-chaos-store-") as folder:
        store = Path(folder) / "store"
        worker, gateway = _settings(config, store)
        async with Fleet(
            workers=config.workers,
            gateways=config.gateways,
            worker=worker,
            gateway=gateway,
            appendfsync=config.appendfsync,
            keep_logs=config.keep_logs,
        ) as fleet:
            client = connect(fleet.redis.url)
            try:
                async with Ear(fleet.redis.url) as ear:
                    await _play(report, plan, fleet, client, ear, store, reference or _simulated)
            finally:
                await client.aclose()
            report.crashes = fleet.crashes
    return report


async def _play(
    report: Report, plan: Plan, fleet: Fleet, client: Any, ear: Ear, store: Path, reference: Reference
) -> None:
    """From a fleet that starts to the verdict."""
    config = report.config
    await fleet.wait_ready()
    adapters = ChaosAdapters(client, config.pool, store, config.adapters, config.seed)
    targets = await JobStore(client).get_targets(config.pool)
    await adapters.begin({} if targets is None else targets.modules)
    times = Times(config.lease_s, config.grace_s, config.step_timeout_s)
    stage = _Stage(config, plan, fleet, Weather(fleet, client, ear, times, config.pool, adapters), ear)
    report.began = time.monotonic()
    witnesses = await stage.run()
    report.seconds = time.monotonic() - report.began
    await fleet.wait_ready()
    report.hits = stage.hits
    report.leftovers = await aftermath.settle(client, config.pool, config.lanes)
    await _judge(report, client, witnesses, ear, reference, adapters)


async def record(config: Config, plan: Plan) -> Reference:
    """What the same orders give with nothing going wrong, from a run of their own."""
    calm = [dataclasses.replace(order, cancel_at=None, leaves_at=None, breaks=()) for order in plan.orders]
    report = await run(config, Plan(calm, []), lambda order, envelope: None)
    if not report.ok:
        raise RuntimeError("the undisturbed run failed: " + "; ".join(map(str, [*report.faults, *report.leftovers])))
    return lambda order, envelope: None if order is None else report.results[order.number]


def _simulated(order: Order | None, envelope: Envelope) -> list[ChoiceResult]:
    """The simulated engine's tokens are a function of the request, so they are made here once more."""
    return expected(envelope)


class _Stage:
    """Clients and disturbances side by side. Disturbances come at orders taken up; clients wait for those due."""

    def __init__(self, config: Config, plan: Plan, fleet: Fleet, weather: Weather, ear: Ear) -> None:
        self._config, self._plan, self._fleet, self._weather, self._ear = config, plan, fleet, weather, ear
        self._taken = self._running = 0
        self._moved = asyncio.Event()
        self._strikes: list[asyncio.Task[None]] = []
        self.hits: list[Hit] = []

    async def run(self) -> list[Witness]:
        """All orders, all disturbances; answers what the clients saw."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(READ_S, pool=None)
        async with httpx.AsyncClient(limits=limits, timeout=timeout) as http, asyncio.TaskGroup() as tasks:
            client = ChaosClient(self._fleet.urls, http, self._config.patience_s)
            orders = iter(self._plan.orders)
            served = [tasks.create_task(self._serve(client, orders)) for _ in range(self._config.clients)]
            await self._conduct()
            return [witness for task in served for witness in await task]

    async def _serve(self, client: ChaosClient, orders: Any) -> list[Witness]:
        """One client after the other."""
        witnesses = []
        for order in orders:
            await self._pace()
            self._taken += 1
            self._running += 1
            self._moved.set()
            witnesses.append(await client.serve(order))
            self._running -= 1
        return witnesses

    async def _pace(self) -> None:
        """Where orders are ahead of disturbances, only half of the clients go on."""
        plan, some = self._plan, max(2, self._config.clients // 2)
        while self._running >= some and len(self.hits) < len(plan.disturbances):
            if self._taken < plan.disturbances[len(self.hits)].after + some:
                return
            await asyncio.sleep(0.05)

    async def _conduct(self) -> None:
        for disturbance in self._plan.disturbances:
            while self._taken < disturbance.after:
                self._moved.clear()
                await self._moved.wait()
            if disturbance.alone:
                await self._strike_alone(disturbance)
            else:
                self._strikes.append(asyncio.create_task(self._strike(disturbance)))
                await asyncio.sleep(disturbance.gap)
        await self._quiet()
        self._weather.clear()

    async def _strike(self, disturbance: Disturbance) -> None:
        self.hits.append(await self._weather.strike(disturbance))

    async def _strike_alone(self, disturbance: Disturbance) -> None:
        """With all others over: processes are up again, and workers may reclaim (one lease after an outage)."""
        await self._quiet()
        await self._fleet.wait_ready()
        await asyncio.sleep(self._config.lease_s + 0.5)
        hit = await self._weather.strike(disturbance)
        self.hits.append(hit)
        watches = [self._ear.until_taken_up(job_id, epoch) for job_id, epoch in hit.held.items()]
        try:
            async with asyncio.timeout(_WATCH_S):
                await asyncio.gather(*watches)
            hit.timed = True
        except TimeoutError:
            pass  # the clients' patience says what that means

    async def _quiet(self) -> None:
        await asyncio.gather(*self._strikes)


async def _judge(
    report: Report, client: Any, witnesses: list[Witness], ear: Ear, reference: Reference, adapters: ChaosAdapters
) -> None:
    store = JobStore(client)
    by_job = {witness.job_id: witness for witness in witnesses if witness.job_id is not None}
    report.jobs = len(witnesses)
    for witness in witnesses:
        report.counts.update(refusals=witness.refusals, losses=witness.losses, drops=witness.drops)
        if witness.job_id is None:
            report.faults += judge_witness(witness, Evidence())
    known = {job_id async for job_id in Upkeep(client).job_ids(report.config.pool)}
    evidences: dict[str, Evidence] = {}
    for job_id in known | set(by_job):
        witness = by_job.get(job_id)
        heard = ear.jobs[job_id].epochs if job_id in ear.jobs else []
        order = None if witness is None else witness.order
        evidence = evidences[job_id] = await collect(store, job_id, order, heard, reference)
        report.faults += judge_job(job_id, evidence)
        report.matches += match(evidence)
        if witness is not None:
            report.faults += judge_witness(witness, evidence)
            report.faults += judge_adapter(witness, evidence, adapters.could_be)
            if evidence.result is not None:
                report.results[witness.order.number] = evidence.result.choices
    report.counts["jobs_in_redis"] = len(known)
    report.counts["adapted_jobs"] = sum(e.envelope is not None and bool(e.envelope.adapter) for e in evidences.values())
    _time(report, by_job, evidences, ear)


async def collect(
    store: JobStore, job_id: str, order: Order | None, heard: Sequence[int], reference: Reference
) -> Evidence:
    """What Redis holds of a job."""
    try:
        view = await store.get(job_id)
    except JobNotFoundError:
        return Evidence(heard=heard)
    frames = [decode(data, Frame) for data in await store.read_log(job_id, count=1_000_000)]
    result = None if view.result is None else decode(view.result, Result)
    return Evidence(view.status, frames, result, reference(order, view.envelope), heard, view.envelope)


def match(evidence: Evidence) -> Iterator[tuple[bool, bool]]:
    """Of a completed job: whether two workers wrote its log, and whether its answer is the undisturbed one."""
    if evidence.status == "completed" and evidence.result is not None and evidence.expected is not None:
        answers = [
            [(choice.token_ids, choice.text, choice.finish_reason) for choice in choices]
            for choices in (evidence.result.choices, evidence.expected)
        ]
        yield len({frame.epoch for frame in evidence.frames}) > 1, answers[0] == answers[1]


def _share(truths: Iterable[bool]) -> float:
    """Of those that are true; 1 where there are none."""
    return statistics.mean([*truths] or [True])


def _time(report: Report, by_job: Mapping[str, Witness], evidences: Mapping[str, Evidence], ear: Ear) -> None:
    """When each job that was hit went on, as its client saw it, or else as it was heard."""
    for hit in report.hits:
        for job_id, epoch in hit.held.items():
            at = _went_on(by_job.get(job_id), evidences[job_id].frames, ear, job_id, epoch)
            if at is None:
                continue
            hit.went_on[job_id] = at - hit.at
            report.recoveries.setdefault(hit.kind, []).append(at - hit.at)
            if hit.timed:
                report.timed.setdefault(hit.kind, []).append(at - hit.at)


def _went_on(witness: Witness | None, frames: list[Frame], ear: Ear, job_id: str, epoch: int) -> float | None:
    """Monotonic seconds of a job's first token under a later epoch; None if it ended under this one."""
    later = (f for f in frames if f.epoch > epoch and (f.last or any(choice.ids for choice in f.choices)))
    frame = next(later, None)
    if frame is None:
        return None
    seen = [
        arrival.at
        for reading in (witness.readings if witness is not None else [])
        for arrival in reading.arrivals
        if arrival.seq >= frame.seq
    ]
    if seen:
        return min(seen)
    heard = ear.jobs[job_id]
    return next((at for at, e in zip(heard.times, heard.epochs, strict=True) if e > epoch), None)


def describe(report: Report) -> list[tuple[str, str, str, str]]:
    """Rows of kind, how often, jobs hit, and seconds until they went on (timed ones in brackets)."""
    rows = []
    for kind, count in sorted(Counter(hit.kind for hit in report.hits).items()):
        jobs = sum(len(hit.held) for hit in report.hits if hit.kind == kind)
        rows.append((kind, str(count), str(jobs), _spread(report, kind)))
    return rows


def _spread(report: Report, kind: str) -> str:
    text = []
    for times in (report.recoveries.get(kind), report.timed.get(kind)):
        if times:
            text.append(f"{statistics.median(times):.2f} / {max(times):.2f}")
    return f"{text[0]} ({text[1]})" if len(text) == 2 else text[0] if text else ""


__all__ = ["KINDS", "Config", "Reference", "Report", "describe", "match", "plan_of", "record", "run"]
