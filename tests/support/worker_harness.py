"""Worker processes for tests, jobs for them, and a client that follows a job as a gateway does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from engine.request import EngineRequest, StepOutput
from engine.sim import SimConfig, SimEngine
from shared import keys
from shared.adapter_record import Content, PendingLoad
from shared.adapters import Adapters
from shared.connect import connect, connect_pubsub
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import ChoiceResult, Envelope, Frame, JobClass, Result, TokenLogprob, decode
from shared.sampling import SamplingParams
from tests.support.at_rest import assert_at_rest, end_live
from tests.support.redis_topology import raw_client
from worker.outbox import wire_logprob
from worker.transcript import Transcript

ROOT = Path(__file__).resolve().parents[2]
POOL = "pool"
LANES = 4
LEASE_S = 1.0
#: Until a worker that was told to stop, and holds nothing, counts as unable to.
STOP_S = 10.0
#: Until something that is to happen counts as not happening.
PATIENCE_S = 60.0


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a process, if it is there. Its own method may reap one that has just ended: its exit code is lost then."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


class WorkerProcess:
    """A worker as a real process. Its log lines are read as they come, so a test waits for an event, not for a time."""

    def __init__(self, redis_url: str, *, fault: str | None = None, **settings: object) -> None:
        defaults: dict[str, object] = {
            "redis_url": redis_url, "engine": "sim", "pool": POOL, "lanes": LANES, "lease_s": LEASE_S,
            "heartbeat_s": 0.2, "grace_s": 20, "home_poll_ms": 100, "all_poll_ms": 200, "health_port": 0,
            "sim_step_ms": 20, "log_level": "debug", "log_json": True,
        }  # fmt: skip
        merged = {f"ROPEWAY_{k.upper()}": str(v) for k, v in {**defaults, **settings}.items()}
        self._env = {**os.environ, **merged, **({"FAULT": fault} if fault else {})}
        self._module = "tests.support.faulty_worker" if fault else "worker"
        self.lines: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._process: asyncio.subprocess.Process
        self._reader: asyncio.Task[None]

    async def start(self, *, ready: bool = True) -> WorkerProcess:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, cwd=ROOT, env=self._env, stderr=asyncio.subprocess.PIPE, limit=2**20
        )
        self._reader = asyncio.create_task(self._read())
        if ready:
            await self.event("worker is ready")
        return self

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            try:
                parsed = json.loads(line)
            except ValueError:
                parsed = {"event": line.decode()}
            async with self._news:
                self.lines.append(parsed)
                self._news.notify_all()
        async with self._news:
            self.lines.append({"event": "<end>"})
            self._news.notify_all()

    async def event(self, *names: str, **fields: Any) -> dict[str, Any]:
        """The first log line with one of these events and all of these fields."""

        def find() -> dict[str, Any] | None:
            return next(
                (ln for ln in self.lines if ln["event"] in names and fields.items() <= ln.items()),
                None,
            )

        async with self._news:
            async with asyncio.timeout(PATIENCE_S):
                await self._news.wait_for(lambda: find() is not None or self.lines[-1:] == [{"event": "<end>"}])
        found = find()
        assert found is not None, f"the worker ended without {names}: {self.lines[-5:]}"
        return found

    @property
    def owner(self) -> str:
        return next(str(line["owner"]) for line in self.lines if "owner" in line)

    @property
    def health_port(self) -> int:
        return next(int(line["health_port"]) for line in self.lines if "health_port" in line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        send_signal(self._process, number)

    async def wait(self) -> int:
        """The exit code."""
        async with asyncio.timeout(PATIENCE_S):
            code = await self._process.wait()
            await self._reader
        return code

    async def stop(self) -> None:
        """End it in order if it lives and is able to."""
        if self.alive:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
        await self.close()

    async def close(self) -> None:
        if self.alive:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        await self.wait()


class Follower:
    """A job as its client sees it: subscribed before the log is read, so that nothing is missed."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.frames: list[Frame] = []
        self._news = asyncio.Condition()

    async def run(self, store: JobStore, client: redis.asyncio.Redis, subscribed: asyncio.Event) -> None:
        channel = keys.events(JobId.parse(self.job_id))
        while not (self.frames and self.frames[-1].last):
            try:
                async with client.pubsub() as pubsub:
                    await pubsub.subscribe(channel)
                    await self._catch_up(store)
                    subscribed.set()
                    while not (self.frames and self.frames[-1].last):
                        message = await pubsub.get_message(timeout=1.0)
                        if message is None or message["type"] != "message" or not message["data"]:
                            await self._catch_up(store)
                        else:
                            await self._take([message["data"]])
            except (redis.RedisError, OSError):
                await asyncio.sleep(0.05)

    async def _catch_up(self, store: JobStore) -> None:
        seen = self.frames[-1].seq if self.frames else 0
        await self._take(await store.read_log(self.job_id, seen))

    async def _take(self, data: list[bytes]) -> None:
        async with self._news:
            for frame in (decode(item, Frame) for item in data):
                if not self.frames or frame.seq > self.frames[-1].seq:
                    self.frames.append(frame)
            self._news.notify_all()

    async def until(self, condition: Callable[[list[Frame]], bool]) -> list[Frame]:
        """Wait until the frames satisfy a condition."""
        async with self._news:
            async with asyncio.timeout(PATIENCE_S):
                await self._news.wait_for(lambda: condition(self.frames))
        return self.frames

    async def tokens(self, count: int) -> list[Frame]:
        """Wait until so many tokens have come."""
        return await self.until(lambda frames: sum(len(c.ids) for f in frames for c in f.choices) >= count)

    async def end(self) -> list[Frame]:
        """Wait for the last frame."""
        return await self.until(lambda frames: bool(frames) and frames[-1].last)


class Harness:
    """A Redis server's jobs and workers. `async with harness(url) as h`."""

    def __init__(self, url: str, client: Any) -> None:
        self.url = url
        self.client = client
        self._commands = connect(url)
        self.store = JobStore(self._commands)
        self._subscriber = connect_pubsub(url)
        self._followers: list[asyncio.Task[None]] = []
        self._workers: list[WorkerProcess] = []

    async def worker(
        self, *, ready: bool = True, fault: str | None = None, url: str | None = None, **settings: object
    ) -> WorkerProcess:
        """Start a worker, on another way to the server where there is a `url`."""
        worker = WorkerProcess(url or self.url, fault=fault, **settings)
        self._workers.append(worker)
        return await worker.start(ready=ready)

    async def submit(self, job: Envelope) -> Follower:
        """Follow a job, then submit it."""
        follower = await self.follow(job.id)
        await self.store.submit(job)
        return follower

    async def follow(self, job_id: str) -> Follower:
        follower, subscribed = Follower(job_id), asyncio.Event()
        self._followers.append(asyncio.create_task(follower.run(self.store, self._subscriber, subscribed)))
        await subscribed.wait()
        return follower

    async def name_adapter(self, name: str, identity: str, *, pinned: bool = False) -> None:
        """Have a name stand for a content from now on, as a load does."""
        adapters = Adapters(self._commands)
        load = PendingLoad(version=0, source="test", pinned=pinned)
        record, *_ = await adapters.begin(name, POOL, load, replace=True)
        assert record.pending is not None
        assert await adapters.finish(name, record.pending.version, Content(identity=identity, rank=4, bytes=1), 1)

    async def unname_adapter(self, name: str) -> None:
        """Unload a name."""
        await Adapters(self._commands).remove(name)

    async def holder(self, job_id: str) -> WorkerProcess:
        """The worker that holds a job."""
        owner = (await self.client.hget(keys.job(JobId.parse(job_id)), "owner") or b"").decode()
        return next(worker for worker in self._workers if worker.owner == owner)

    async def result(self, job_id: str) -> Result:
        """The stored result, checked against the log."""
        view = await self.store.get(job_id)
        assert view.result is not None
        result = decode(view.result, Result)
        frames = [decode(data, Frame) for data in await self.store.read_log(job_id, count=100_000)]
        assert [frame.seq for frame in frames] == list(range(1, len(frames) + 1)), "the log has a gap"
        assert [frame.last for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert [frame.epoch for frame in frames] == sorted(frame.epoch for frame in frames)
        assert [frame.kind for frame in frames].count("started") <= 1
        log = Transcript.of(view.envelope)
        for frame in frames:
            log.add(frame.choices, frame.prompt_logprobs)
        replayed = log.result(job_id, result.status, result.usage, result.timings, result.error)
        assert replayed.choices == result.choices, "the result is not what was published"
        assert replayed.prompt_logprobs == result.prompt_logprobs, "the result is not what was published"
        assert result.status == view.status == frames[-1].status
        assert result.usage == frames[-1].usage
        assert result.usage.prompt_tokens == len(view.envelope.prompt_token_ids)
        assert result.usage.completion_tokens == log.completion_tokens
        return result

    async def assert_clean(self) -> None:
        """Nothing is queued, running or pending, and every key that belongs to a job expires."""
        load = await self.store.pool_load(POOL, LANES)
        assert (load.queued_jobs, load.queued_tokens, load.running_jobs, load.running_tokens) == (0, 0, 0, 0)
        for lane in range(LANES):
            for stream in keys.lane_streams(POOL, lane):
                if await self.client.exists(stream):
                    assert await self.client.xlen(stream) == 0
                    assert (await self.client.xpending(stream, keys.GROUP))["pending"] == 0
        permanent = {keys.card(POOL), keys.tokenizer(POOL), keys.pools()}
        async for name in self.client.scan_iter("*"):
            if name.decode() not in permanent:
                assert await self.client.pttl(name) != -1, f"{name!r} never expires"

    async def rest(self) -> None:
        """End all jobs and all workers as one should, and check that nothing is left of them."""
        await end_live(self.url, POOL)
        for worker in self._workers:
            await worker.stop()
        await assert_at_rest(self.url, POOL, LANES)

    async def close(self) -> None:
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        for worker in self._workers:
            await worker.close()
        for client in (self._subscriber, self._commands, self.client):
            await client.aclose()


@asynccontextmanager
async def harness(url: str, *, clean: bool = True) -> AsyncIterator[Harness]:
    """Workers and clients on one server; everything is ended afterwards, and with `clean` nothing may be left of it."""
    h = Harness(url, await raw_client(url))
    try:
        yield h
        if clean:
            await h.rest()
    finally:
        await h.close()


def job(
    number: int = 0,
    *,
    lane: int = 0,
    job_class: JobClass = "normal",
    flush_ms: int = 0,
    prompt: int = 4,
    adapter: str | None = None,
    **sampling: Any,
) -> Envelope:
    """A job of its own prompt; it generates 40 tokens unless told otherwise. `adapter` is the identity of one."""
    params = {"max_tokens": 40, "seed": 1000 + number, "ignore_eos": True, **sampling}
    return Envelope(
        id=str(JobId.new(POOL, lane)),
        model=POOL,
        prompt_token_ids=[10 + number % 100, *(11 + at % 300 for at in range(prompt - 1))],
        sampling=SamplingParams(**params),
        job_class=job_class,
        flush_ms=flush_ms,
        adapter=None if adapter is None else f"name-of-{adapter[:4]}",
        adapter_identity=adapter,
    )


def expected(envelope: Envelope) -> list[ChoiceResult]:
    """The choices of an undisturbed run."""
    choices = [ChoiceResult(index=index) for index in range(envelope.sampling.n)]
    for output in _undisturbed(envelope):
        for delta in output.choices:
            choice = choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            if delta.logprobs is not None:
                choice.logprobs = (choice.logprobs or []) + [wire_logprob(entry) for entry in delta.logprobs]
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    return choices


def expected_prompt(envelope: Envelope) -> list[TokenLogprob]:
    """The prompt's log probabilities in an undisturbed run."""
    return [wire_logprob(entry) for output in _undisturbed(envelope) for entry in output.prompt_logprobs]


def _undisturbed(envelope: Envelope) -> Iterator[StepOutput]:
    engine = SimEngine(SimConfig(step_ms=0, max_model_len=32_768, max_loras=1))
    engine.add(EngineRequest("x", envelope.prompt_token_ids, envelope.sampling, adapter=envelope.adapter_identity))
    while engine.has_work():
        yield from engine.step()
