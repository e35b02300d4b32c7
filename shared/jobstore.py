"""Typed calls of the scripts. Every change of a job's state is one script call, and every call is safe to repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import structlog

from shared import class_loads, keys, readings, scripts
from shared.calls import AsyncClient, SyncClient, node_of, run, run_everywhere, run_sync
from shared.cluster import Cluster, SyncCluster
from shared.errors import (
    ConflictError,
    ForeignDataError,
    JobNotFoundError,
    JobRunningError,
    ProtocolError,
    ServiceUnavailableError,
)
from shared.jobs import (
    DeadLetter,
    JobView,
    LaneLimits,
    LaneLoad,
    Lease,
    Lifetime,
    Owned,
    Publication,
    Publish,
    PullBudget,
    Pulled,
    ReplicaWait,
    Submitted,
)
from shared.keys import JobId
from shared.protocol import (
    AdapterTargets,
    Card,
    Envelope,
    JobStatus,
    TokenizerBundle,
    WorkerInfo,
    decode,
    encode,
)
from shared.redis_errors import RETRY_AFTER_S, TROUBLE, typed
from shared.scripts import Call
from shared.trace_context import Trace

log = structlog.get_logger(__name__)

_DEFAULT_LIMITS: Final = LaneLimits()
_DEFAULT_LIFETIME: Final = Lifetime()


class JobStore:
    """Jobs, their logs and the registry in Redis, for asyncio.

    Every method raises ServiceUnavailableError where Redis is away, loading, full, read-only or failing over. In a
    cluster that is so for the node that serves the keys; what is said of a pipeline holds for each node's part of it.

    Args:
        redis: a client of `shared.connect.connect`.
        limits: of each lane, where a submit brings none of its own.
        lifetime: of each job, likewise.
        replicas: what a submit waits for; None: nothing but the primary.
        usage_days: how long it is kept what each job used.
    """

    def __init__(
        self,
        redis: AsyncClient,
        *,
        limits: LaneLimits = _DEFAULT_LIMITS,
        lifetime: Lifetime = _DEFAULT_LIFETIME,
        replicas: ReplicaWait | None = None,
        usage_days: int = scripts.USAGE_DAYS,
    ) -> None:
        self._redis = redis
        self._limits = limits
        self._lifetime = lifetime
        self._replicas = replicas
        self._usage_days = usage_days
        # Per lane and owner: token of the last pull's answer that arrived, and who is pulling.
        self._seen: dict[tuple[str, int, str], bytes] = {}
        self._pulling: dict[tuple[str, int, str], asyncio.Lock] = {}

    async def submit(
        self,
        envelope: Envelope,
        *,
        lifetime: Lifetime | None = None,
        limits: LaneLimits | None = None,
        attachment: bytes = b"",
    ) -> Submitted:
        """Accept a job. The same id again changes nothing and answers `duplicate`.

        `attachment` is kept with the job, for whoever reads it with `get`.

        Raises:
            OverloadedError: a limit of the lane is reached; nothing was written.
            ProtocolError: the envelope is too large or its id is malformed.
            ServiceUnavailableError: also where too few replicas have the job. It may be in the queue all the same: the
                caller cancels it, or submits it again.
        """
        call = scripts.submit(
            envelope,
            lifetime or self._lifetime,
            limits or self._limits,
            self._replicas,
            attachment,
            self._usage_days,
        )
        return readings.parse_submit(await self._run(call), self._replicas)

    async def pull(self, pool: str, lane: int, owner: str, budget: PullBudget, lease: Lease) -> Pulled:
        """Take jobs from one lane, as far as the budget goes.

        Where an answer is lost on the way (time-out, lost connection, cancelled task), the next pull of the same owner
        from the lane gives its jobs again. So an owner pulls through one store only.
        """
        place = (pool, lane, owner)
        async with self._pulling.setdefault(place, asyncio.Lock()):
            call = scripts.pull(pool, lane, owner, budget, lease, self._seen.get(place, b""))
            raw = await self._run(call)
            if raw is None:
                return Pulled()
            answer = readings.parse_pull(raw)
            for job, error in answer.broken:
                log.error("job buried: its envelope does not decode", job_id=job.job_id, error=error.message)
                await self._run(scripts.bury(owner, job, error))
                answer.pulled.ended[job.job_id] = "failed"
                answer.pulled.buried.append(job.job_id)
            # Last, and with no await behind it: only now is it certain that the caller gets the jobs.
            self._seen[place] = answer.token
            return answer.pulled

    async def publish(self, items: Sequence[Publish]) -> list[Publication]:
        """Append frames and end jobs, in one pipeline; one answer per item. Frames that are there count as sent.

        In a cluster that is one pipeline per node. Where a node is away its items are answered AWAY, also where nothing
        else was sent: repeat them.

        Raises:
            ProtocolError: a gap in a job's sequence numbers. The other items were published; they may be repeated.
        """
        answers = await run(self._redis, [scripts.publish(item) for item in items])
        return _publications(answers, several=isinstance(self._redis, Cluster))

    async def renew(self, owner: str, jobs: Sequence[Owned]) -> list[Publication]:
        """Keep jobs for another lease, in one pipeline; one answer per job, AWAY as in `publish`."""
        return [readings.parse_publication(a) for a in await self._run_all([scripts.renew(owner, job) for job in jobs])]

    async def release(self, owner: str, job: Owned) -> bool:
        """Give a job back with its attempt refunded. False: it was no longer the owner's."""
        return bool(await self._run(scripts.release(owner, job)))

    async def cancel(self, job_id: str) -> JobStatus | None:
        """End a queued job, flag a running one and tell its worker.

        Returns:
            The status after the call: `cancelled`, `running` (flagged), or how the job had ended; None if unknown.
        """
        parsed = JobId.match(job_id)
        answer = None if parsed is None else await self._run(scripts.cancel(parsed))
        return None if answer is None else readings.parse_status(answer)

    async def delete(self, job_id: str) -> JobStatus:
        """Remove a job with log, result and dead letter. One that is delayed or queued ends first, as by `cancel`.

        Returns:
            The status that it had.

        Raises:
            JobNotFoundError: no job has this id.
            JobRunningError: it runs, and nothing was removed: it is to be cancelled first.
        """
        answer = await self._run(scripts.delete(JobId.parse(job_id)))
        if answer is None:
            raise JobNotFoundError("no job has this id", param="id")
        status = readings.parse_status(answer)
        if status == "running":
            raise JobRunningError("the job is running: cancel it, and delete it when it has ended", param="id")
        return status

    async def owner(self, job_id: str) -> str:
        """The tenant whose job it is. Raises JobNotFoundError."""
        tenant = await self._ask("HGET", keys.job(JobId.parse(job_id)), "tenant")
        if tenant is None:
            raise JobNotFoundError("no job has this id", param="id")
        return str(tenant.decode(errors="replace"))

    async def trace(self, job_id: str) -> Trace:
        """The trace context that a job was submitted with. Raises JobNotFoundError, and ProtocolError as `get`."""
        data = await self._ask("HGET", keys.job(JobId.parse(job_id)), "env")
        if data is None:
            raise JobNotFoundError("no job has this id", param="id")
        return decode(data, Envelope).trace

    async def forget(self, pool: str, owner: str, lanes: int) -> int:
        """Delete a worker's consumers where nothing is pending on them.

        Returns:
            On how many streams something still is.
        """
        answers = await self._run_all([scripts.forget(pool, lane, owner) for lane in range(lanes)])
        return sum(_raised(answer) for answer in answers)

    async def get(self, job_id: str) -> JobView:
        """A job with its envelope and result.

        Raises:
            JobNotFoundError: no job has this id, or it has expired.
            ProtocolError: its envelope does not decode.
        """
        values = await self._ask("HMGET", keys.job(JobId.parse(job_id)), *readings.VIEW_FIELDS)
        if values[0] is None or values[1] is None:
            raise JobNotFoundError("no job has this id", param="id")
        return readings.parse_view(job_id, values)

    async def status(self, job_id: str) -> tuple[JobStatus, int]:
        """Status and sequence number of the last frame. Raises JobNotFoundError."""
        status, seq = await self._ask("HMGET", keys.job(JobId.parse(job_id)), "status", "seq")
        if status is None:
            raise JobNotFoundError("no job has this id", param="id")
        return readings.parse_status(status), readings.parse_number(seq)

    async def read_log(self, job_id: str, after_seq: int = 0, count: int = 1000) -> list[bytes]:
        """Encoded frames with a sequence number above `after_seq`, in order, at most `count`."""
        log = keys.events(JobId.parse(job_id))
        entries = await self._ask("XRANGE", log, f"{after_seq + 1}-0", "+", "COUNT", count)
        return [readings.parse_frame(fields) for _, fields in entries]

    async def readers(self, job_id: str) -> int | None:
        """How many subscriptions to a job's channel there are; None if a node that may have some does not say."""
        channel = keys.events(JobId.parse(job_id))
        answers = await run_everywhere(self._redis, Call(("PUBSUB", "NUMSUB", channel), channel))
        found = sum(answer[1] for answer in answers if not isinstance(answer, Exception))
        return found or (None if any(isinstance(answer, Exception) for answer in answers) else 0)

    async def node(self, pool: str, lane: int) -> str:
        """Which of the nodes that `shared.connect.connect` names to its `connected` serves a lane now."""
        try:
            return await node_of(self._redis, keys.stats(pool, lane))
        except TROUBLE as error:
            raise typed(error) from error

    async def lane_load(self, pool: str, lane: int) -> LaneLoad:
        """Exact counters of one lane."""
        return readings.parse_load(await self._ask("HMGET", keys.stats(pool, lane), *readings.LOAD_FIELDS))

    async def lane_loads(self, pool: str, lanes: Sequence[int]) -> list[LaneLoad | None]:
        """Exact counters of several lanes, in one round trip; None where a lane's node is away while others answer."""
        answers = await self._run_all([_plain("HMGET", keys.stats(pool, n), *readings.LOAD_FIELDS) for n in lanes])
        return [
            None if isinstance(answer, ServiceUnavailableError) else readings.parse_load(_raised(answer))
            for answer in answers
        ]

    async def pool_load(self, pool: str, lanes: int) -> LaneLoad:
        """Exact counters of every lane, summed."""
        loads = await self.lane_loads(pool, range(lanes))
        known = [load for load in loads if load is not None]
        if len(known) < lanes:
            raise ServiceUnavailableError("some nodes of Redis are not available", retry_after=RETRY_AFTER_S)
        return LaneLoad(**{name: sum(getattr(load, name) for load in known) for name in readings.LOAD_FIELDS})

    async def class_loads(self, pool: str, lanes: int) -> dict[str, LaneLoad]:
        """What every lane has queued and running, summed by class. Several times the cost of `pool_load`."""
        calls = [_plain("HMGET", keys.stats(pool, lane), *class_loads.FIELDS) for lane in range(lanes)]
        return class_loads.summed(_raised(answer) for answer in await self._run_all(calls))

    async def dead_letters(self, pool: str, lane: int, count: int = 100) -> list[DeadLetter]:
        """Buried jobs of a lane, the newest first."""
        entries = await self._ask("XREVRANGE", keys.dead(pool, lane), "+", "-", "COUNT", count)
        return [readings.parse_dead_letter(entry, fields) for entry, fields in entries]

    async def put_card(self, card: Card, bundle: TokenizerBundle) -> Card:
        """Join a pool: write its card if there is none. The first writer wins.

        Returns:
            The card that holds.

        Raises:
            ConflictError: it differs in wire version, model, lanes, context, vocabulary or largest rank of adapters. It
                is replaced only where no worker lives and nothing is queued or running.
        """
        agreement, data, tokenizer = scripts.agreement(card), encode(card), encode(bundle)
        held, found, live = await self._run(scripts.join(card.pool, agreement, data, tokenizer, ""))
        if held.decode() != agreement and not live and await self._drained(card.pool, found):
            call = scripts.join(card.pool, agreement, data, tokenizer, held.decode())
            held, found, live = await self._run(call)
        if held.decode() != agreement:
            raise ConflictError(_disagreement(card.pool, held.decode(), agreement))
        await self._ask("SADD", keys.pools(), card.pool)
        try:
            return decode(found, Card)
        except ProtocolError as error:  # every member with this agreement would write the same
            log.error("card written again: it does not decode", pool=card.pool, error=error.message)
            await self._ask("HSET", keys.card(card.pool), "card", data)
            return card

    async def get_card(self, pool: str) -> Card | None:
        """The pool's card, or None. Raises VersionError for a card of another wire version."""
        data = await self._ask("HGET", keys.card(pool), "card")
        return None if data is None else decode(data, Card)

    async def put_targets(self, pool: str, targets: AdapterTargets) -> None:
        """Say what an adapter of the pool may change."""
        await self._ask("SET", keys.adapter_targets(pool), encode(targets))

    async def get_targets(self, pool: str) -> AdapterTargets | None:
        """What an adapter of the pool may change; None where it serves none, or no worker has been there."""
        data = await self._ask("GET", keys.adapter_targets(pool))
        return None if data is None else decode(data, AdapterTargets)

    async def get_bundle(self, pool: str) -> TokenizerBundle | None:
        """The pool's tokenizer and chat template, or None."""
        data = await self._ask("GET", keys.tokenizer(pool))
        return None if data is None else decode(data, TokenizerBundle)

    async def pools(self) -> list[str]:
        """Names of pools that have, or had, a card; sorted."""
        names = [name.decode(errors="replace") for name in await self._ask("SMEMBERS", keys.pools())]
        return sorted(name for name in names if keys.POOL_PATTERN.match(name))

    async def heartbeat(self, pool: str, info: WorkerInfo, ttl_ms: int) -> list[str]:
        """Enter a worker into the registry for `ttl_ms`.

        Returns:
            Owners that live, sorted.
        """
        owners = await self._run(scripts.heartbeat(pool, info.owner, encode(info), ttl_ms))
        return [owner.decode(errors="replace") for owner in owners]

    async def live_workers(self, pool: str, ttl_ms: int) -> list[WorkerInfo]:
        """Workers whose last heartbeat is at most `ttl_ms` old, sorted by owner."""
        since = await self.now_ms(pool) - ttl_ms
        owners = sorted(await self._ask("ZRANGEBYSCORE", keys.workers(pool), since, "+inf"))
        names = [keys.worker(pool, owner.decode(errors="replace")) for owner in owners]
        workers = []
        for info in await self._run_all([_plain("HGET", name, "info") for name in names]):
            try:
                data = _raised(info)
                workers += [] if data is None else [decode(data, WorkerInfo)]
            except ProtocolError as error:  # one entry that does not read must not hide the others
                log.warning("a worker's entry does not read", pool=pool, error=error.message)
        return workers

    async def leave(self, pool: str, owner: str) -> None:
        """Take a worker out of the registry."""
        calls = [_plain("ZREM", keys.workers(pool), owner), _plain("DEL", keys.worker(pool, owner))]
        for answer in await self._run_all(calls):
            _raised(answer)

    async def now_ms(self, pool: str | None = None) -> int:
        """Unix milliseconds of Redis's clock. In a cluster, of the node that has the pool's registry, or the pools."""
        key = keys.pools() if pool is None else keys.workers(pool)
        seconds, microseconds = await self._run(Call(("TIME",), key))
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def paused(self, pool: str) -> bool:
        """Whether the pool's workers are to take nothing; see `shared.upkeep`."""
        return bool(await self._ask("EXISTS", keys.paused(pool)))

    async def _drained(self, pool: str, card: bytes) -> bool:
        """Whether nothing is queued or running under a card; a card that does not decode had a pool of its own kind."""
        try:
            lanes = decode(card, Card).lanes
        except ProtocolError:
            lanes = keys.MAX_LANES
        load = await self.pool_load(pool, lanes)
        return load.delayed_jobs + load.queued_jobs + load.running_jobs == 0

    async def _ask(self, command: str, key: str, *arguments: Any) -> Any:
        """The answer to a command about one key."""
        return await self._run(_plain(command, key, *arguments))

    async def _run(self, call: Call) -> Any:
        return _raised((await self._run_all([call]))[0])

    async def _run_all(self, calls: Sequence[Call]) -> list[Any]:
        return _checked(await run(self._redis, calls))


class SyncJobStore:
    """The calls that a worker's threads make. They raise and answer as those of `JobStore`."""

    def __init__(self, redis: SyncClient) -> None:
        self._redis = redis

    def publish(self, items: Sequence[Publish]) -> list[Publication]:
        """See `JobStore.publish`."""
        answers = run_sync(self._redis, [scripts.publish(item) for item in items])
        return _publications(answers, several=isinstance(self._redis, SyncCluster))

    def renew(self, owner: str, jobs: Sequence[Owned]) -> list[Publication]:
        """See `JobStore.renew`."""
        return [readings.parse_publication(a) for a in self._run_all([scripts.renew(owner, job) for job in jobs])]

    def release(self, owner: str, job: Owned) -> bool:
        """See `JobStore.release`."""
        return bool(_raised(self._run_all([scripts.release(owner, job)])[0]))

    def bury(self, owner: str, job: Owned, error: ProtocolError) -> bool:
        """Give up a job whose data cannot be read: a dead letter, an error for its client. False: no longer its owner.

        Raises:
            ForeignDataError: not even that is possible.
        """
        return bool(_raised(self._run_all([scripts.bury(owner, job, error)])[0]))

    def _run_all(self, calls: Sequence[Call]) -> list[Any]:
        return _checked(run_sync(self._redis, calls))


def _disagreement(pool: str, there: str, here: str) -> str:
    """What keeps a worker out of a pool. An agreement begins with the wire version."""
    versions = there.partition(":")[0], here.partition(":")[0]
    if versions[0] != versions[1]:
        return (
            f"pool {pool} speaks wire version {versions[0]}, this process speaks {versions[1]}: workers of both cannot "
            "serve one pool; let its jobs end and its workers go first, or take another pool"
        )
    return (
        f"pool {pool} has another card: wire version, model digest, lanes, context, vocabulary and "
        f"largest adapter rank are {there} there and {here} here"
    )


def _plain(command: str, key: str, *arguments: Any) -> Call:
    return Call((command, key, *arguments), key)


def _publications(answers: list[Any], *, several: bool) -> list[Publication]:
    """Answers to `publish`, by one node or by several. A node that is away says nothing of the others, even where
    nothing was sent to them: their frames must not wait for it."""
    return [readings.parse_publication(answer) for answer in _checked(answers, whole=not several)]


def _checked(answers: list[Any], *, whole: bool = True) -> list[Any]:
    """Answers, with errors as callers see them. Two kinds stay among the others, which were done: what Redis refuses
    for its data (ForeignDataError), and what is away (ServiceUnavailableError). With `whole` that is an error where
    nothing else was answered."""
    checked = [typed(answer) if isinstance(answer, Exception) else answer for answer in answers]
    for answer in checked:
        if isinstance(answer, Exception) and not isinstance(answer, ForeignDataError | ServiceUnavailableError):
            raise answer
    if whole and checked and all(isinstance(answer, ServiceUnavailableError) for answer in checked):
        raise checked[0]
    return checked


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
