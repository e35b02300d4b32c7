"""Typed calls of the scripts. Every change of a job's state is one script call, and every call is safe to repeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import redis
import redis.asyncio
import structlog

from shared import keys, scripts
from shared.connect import foreign, unavailable
from shared.errors import ConflictError, ForeignDataError, JobNotFoundError, ProtocolError
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
    Submitted,
)
from shared.keys import JobId
from shared.protocol import (
    Card,
    Envelope,
    JobStatus,
    TokenizerBundle,
    WorkerInfo,
    decode,
    encode,
)
from shared.scripts import Call

log = structlog.get_logger(__name__)

#: How often a call is made again because the server lost its scripts in between.
_SCRIPT_LOADS: Final = 3
_DEFAULT_LIMITS: Final = LaneLimits()
_DEFAULT_LIFETIME: Final = Lifetime()


class JobStore:
    """Jobs, their logs and the registry in Redis, for asyncio.

    Every method raises ServiceUnavailableError where Redis is away, loading, full, read-only or failing over.

    Args:
        redis: a client of `shared.connect.connect`.
        limits: of each lane, where a submit brings none of its own.
        lifetime: of each job, likewise.
    """

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        *,
        limits: LaneLimits = _DEFAULT_LIMITS,
        lifetime: Lifetime = _DEFAULT_LIFETIME,
    ) -> None:
        # Any: redis-py gives sync and async answers one type, `Awaitable[T] | T`.
        self._redis: Any = redis
        self._limits = limits
        self._lifetime = lifetime
        # Per lane and owner: token of the last pull's answer that arrived, and who is pulling.
        self._seen: dict[tuple[str, int, str], bytes] = {}
        self._pulling: dict[tuple[str, int, str], asyncio.Lock] = {}

    async def submit(
        self, envelope: Envelope, *, lifetime: Lifetime | None = None, limits: LaneLimits | None = None
    ) -> Submitted:
        """Accept a job. The same id again changes nothing and answers `duplicate`.

        Raises:
            OverloadedError: a limit of the lane is reached; nothing was written.
            ProtocolError: the envelope is too large or its id is malformed.
        """
        call = scripts.submit(envelope, lifetime or self._lifetime, limits or self._limits)
        return scripts.parse_submit(await self._run(call))

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
            answer = scripts.parse_pull(raw)
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

        Raises:
            ProtocolError: a gap in a job's sequence numbers. The other items were published; they may be repeated.
        """
        return [scripts.parse_publication(a) for a in await self._run_all([scripts.publish(item) for item in items])]

    async def renew(self, owner: str, jobs: Sequence[Owned]) -> list[Publication]:
        """Keep jobs for another lease, in one pipeline; one answer per job."""
        return [scripts.parse_publication(a) for a in await self._run_all([scripts.renew(owner, job) for job in jobs])]

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
        return None if answer is None else scripts.parse_status(answer)

    async def forget(self, pool: str, owner: str, lanes: int) -> int:
        """Delete a worker's consumers where nothing is pending on them.

        Returns:
            On how many streams something still is.
        """
        return sum(_raised(await self._run_all([scripts.forget(pool, lane, owner) for lane in range(lanes)])))

    async def get(self, job_id: str) -> JobView:
        """A job with its envelope and result.

        Raises:
            JobNotFoundError: no job has this id, or it has expired.
            ProtocolError: its envelope does not decode.
        """
        async with self._guard():
            values = await self._redis.hmget(keys.job(JobId.parse(job_id)), scripts.VIEW_FIELDS)
        if values[0] is None or values[1] is None:
            raise JobNotFoundError("no job has this id", param="id")
        return scripts.parse_view(job_id, values)

    async def status(self, job_id: str) -> tuple[JobStatus, int]:
        """Status and sequence number of the last frame. Raises JobNotFoundError."""
        async with self._guard():
            status, seq = await self._redis.hmget(keys.job(JobId.parse(job_id)), "status", "seq")
        if status is None:
            raise JobNotFoundError("no job has this id", param="id")
        return scripts.parse_status(status), scripts.parse_number(seq)

    async def read_log(self, job_id: str, after_seq: int = 0, count: int = 1000) -> list[bytes]:
        """Encoded frames with a sequence number above `after_seq`, in order, at most `count`."""
        async with self._guard():
            entries = await self._redis.xrange(keys.events(JobId.parse(job_id)), f"{after_seq + 1}-0", "+", count)
        return [scripts.parse_frame(fields) for _, fields in entries]

    async def lane_load(self, pool: str, lane: int) -> LaneLoad:
        """Exact counters of one lane."""
        async with self._guard():
            return scripts.parse_load(await self._redis.hmget(keys.stats(pool, lane), scripts.LOAD_FIELDS))

    async def lane_loads(self, pool: str, lanes: Sequence[int]) -> list[LaneLoad]:
        """Exact counters of several lanes, in one round trip."""
        async with self._guard():
            pipe = self._redis.pipeline(transaction=False)
            for lane in lanes:
                pipe.hmget(keys.stats(pool, lane), scripts.LOAD_FIELDS)
            return [scripts.parse_load(values) for values in await pipe.execute()]

    async def pool_load(self, pool: str, lanes: int) -> LaneLoad:
        """Exact counters of every lane, summed."""
        loads = await self.lane_loads(pool, range(lanes))
        return LaneLoad(**{name: sum(getattr(load, name) for load in loads) for name in scripts.LOAD_FIELDS})

    async def dead_letters(self, pool: str, lane: int, count: int = 100) -> list[DeadLetter]:
        """Buried jobs of a lane, the newest first."""
        async with self._guard():
            entries = await self._redis.xrevrange(keys.dead(pool, lane), count=count)
        return [scripts.parse_dead_letter(entry, fields) for entry, fields in entries]

    async def put_card(self, card: Card, bundle: TokenizerBundle) -> Card:
        """Join a pool: write its card if there is none. The first writer wins.

        Returns:
            The card that holds.

        Raises:
            ConflictError: it differs in wire version, model, lanes, context or vocabulary. It is replaced only where no
                worker lives and nothing is queued or running.
        """
        agreement, data, tokenizer = scripts.agreement(card), encode(card), encode(bundle)
        held, found, live = await self._run(scripts.join(card.pool, agreement, data, tokenizer, ""))
        if held.decode() != agreement and not live and await self._drained(card.pool, found):
            call = scripts.join(card.pool, agreement, data, tokenizer, held.decode())
            held, found, live = await self._run(call)
        if held.decode() != agreement:
            raise ConflictError(
                f"pool {card.pool} has another card: wire version, model digest, lanes, context and vocabulary are "
                f"{held.decode()} there and {agreement} here"
            )
        async with self._guard():
            await self._redis.sadd(keys.pools(), card.pool)
        try:
            return decode(found, Card)
        except ProtocolError as error:  # every member with this agreement would write the same
            log.error("card written again: it does not decode", pool=card.pool, error=error.message)
            async with self._guard():
                await self._redis.hset(keys.card(card.pool), "card", data)
            return card

    async def get_card(self, pool: str) -> Card | None:
        """The pool's card, or None. Raises VersionError for a card of another wire version."""
        async with self._guard():
            data = await self._redis.hget(keys.card(pool), "card")
        return None if data is None else decode(data, Card)

    async def get_bundle(self, pool: str) -> TokenizerBundle | None:
        """The pool's tokenizer and chat template, or None."""
        async with self._guard():
            data = await self._redis.get(keys.tokenizer(pool))
        return None if data is None else decode(data, TokenizerBundle)

    async def pools(self) -> list[str]:
        """Names of pools that have, or had, a card; sorted."""
        async with self._guard():
            names = [name.decode(errors="replace") for name in await self._redis.smembers(keys.pools())]
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
        since = await self.now_ms() - ttl_ms
        async with self._guard():
            owners = sorted(await self._redis.zrangebyscore(keys.workers(pool), since, "+inf"))
            pipe = self._redis.pipeline(transaction=False)
            for owner in owners:
                pipe.hget(keys.worker(pool, owner.decode(errors="replace")), "info")
            infos = _checked(await pipe.execute(raise_on_error=False))
        workers = []
        for info in infos:
            try:
                if isinstance(info, ForeignDataError):
                    raise info
                workers += [] if info is None else [decode(info, WorkerInfo)]
            except ProtocolError as error:  # one entry that does not read must not hide the others
                log.warning("a worker's entry does not read", pool=pool, error=error.message)
        return workers

    async def leave(self, pool: str, owner: str) -> None:
        """Take a worker out of the registry."""
        async with self._guard():
            pipe = self._redis.pipeline(transaction=False)
            pipe.zrem(keys.workers(pool), owner)
            pipe.delete(keys.worker(pool, owner))
            await pipe.execute()

    async def paused(self, pool: str) -> bool:
        """Whether the pool's workers are to take nothing; see `shared.upkeep`."""
        async with self._guard():
            return bool(await self._redis.exists(keys.paused(pool)))

    async def now_ms(self) -> int:
        """Unix milliseconds of Redis's clock."""
        async with self._guard():
            seconds, microseconds = await self._redis.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _drained(self, pool: str, card: bytes) -> bool:
        """Whether nothing is queued or running under a card; a card that does not decode had a pool of its own kind."""
        try:
            lanes = decode(card, Card).lanes
        except ProtocolError:
            lanes = keys.MAX_LANES
        load = await self.pool_load(pool, lanes)
        return load.queued_jobs + load.running_jobs == 0

    async def _run(self, call: Call) -> Any:
        async with self._guard():
            for _ in range(_SCRIPT_LOADS):
                try:
                    return await self._redis.execute_command(*call.command)
                except redis.exceptions.NoScriptError:
                    await self._redis.script_load(call.script.text)
            return await self._redis.execute_command(*call.command)

    async def _run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Run calls in one pipeline. If the server did not know a script, everything from there on is run again:
        a later call may depend on the earlier one."""
        answers: list[Any] = []
        async with self._guard():
            for _ in range(_SCRIPT_LOADS + 1):
                pipe = self._redis.pipeline(transaction=False)
                for call in calls[len(answers) :]:
                    pipe.execute_command(*call.command)
                answers += await pipe.execute(raise_on_error=False) if calls[len(answers) :] else []
                if not (missing := _unknown_scripts(calls, answers)):
                    break
                for text in missing:
                    await self._redis.script_load(text)
            return _checked(answers)

    @asynccontextmanager
    async def _guard(self) -> AsyncIterator[None]:
        """Turn errors of Redis into ours. A connection to a demoted primary is of no use: drop them all."""
        try:
            yield
        except (redis.RedisError, OSError) as error:
            if isinstance(error, redis.ReadOnlyError):
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            _raise_typed(error)


class SyncJobStore:
    """The calls that a worker's threads make. They raise and answer as those of `JobStore`."""

    def __init__(self, redis: redis.Redis) -> None:
        self._redis: Any = redis

    def publish(self, items: Sequence[Publish]) -> list[Publication]:
        """See `JobStore.publish`."""
        return [scripts.parse_publication(a) for a in self._run_all([scripts.publish(item) for item in items])]

    def renew(self, owner: str, jobs: Sequence[Owned]) -> list[Publication]:
        """See `JobStore.renew`."""
        return [scripts.parse_publication(a) for a in self._run_all([scripts.renew(owner, job) for job in jobs])]

    def release(self, owner: str, job: Owned) -> bool:
        """See `JobStore.release`."""
        return bool(_raised(self._run_all([scripts.release(owner, job)]))[0])

    def bury(self, owner: str, job: Owned, error: ProtocolError) -> bool:
        """Give up a job whose data cannot be read: a dead letter, an error for its client. False: no longer its owner.

        Raises:
            ForeignDataError: not even that is possible.
        """
        return bool(_raised(self._run_all([scripts.bury(owner, job, error)]))[0])

    def _run_all(self, calls: Sequence[Call]) -> list[Any]:
        answers: list[Any] = []
        try:
            for _ in range(_SCRIPT_LOADS + 1):
                pipe = self._redis.pipeline(transaction=False)
                for call in calls[len(answers) :]:
                    pipe.execute_command(*call.command)
                answers += pipe.execute(raise_on_error=False) if calls[len(answers) :] else []
                if not (missing := _unknown_scripts(calls, answers)):
                    break
                for text in missing:
                    self._redis.script_load(text)
            return _checked(answers)
        except (redis.RedisError, OSError) as error:
            if isinstance(error, redis.ReadOnlyError):
                self._redis.connection_pool.disconnect(inuse_connections=False)
            _raise_typed(error)


def _unknown_scripts(calls: Sequence[Call], answers: list[Any]) -> set[str]:
    """Texts of the scripts that the server did not know; the answers are cut off before the first of them."""
    unknown = [i for i, answer in enumerate(answers) if isinstance(answer, redis.exceptions.NoScriptError)]
    texts = {calls[i].script.text for i in unknown}
    if unknown:
        del answers[unknown[0] :]
    return texts


def _checked(answers: list[Any]) -> list[Any]:
    """Answers of a pipeline. One that Redis refuses for its data stays among them, as ForeignDataError: the others
    were done. Any other error is raised."""
    checked = [foreign(answer) or answer if isinstance(answer, Exception) else answer for answer in answers]
    for answer in checked:
        if isinstance(answer, BaseException) and not isinstance(answer, ForeignDataError):
            raise answer
    return checked


def _raised(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _raise_typed(error: redis.RedisError | OSError) -> NoReturn:
    """Raise what callers see; an error that nobody foresaw goes on as it is."""
    if str(error).startswith("RW"):
        raise ProtocolError(f"a script refused its arguments: {error}") from error
    if (typed := unavailable(error) or foreign(error)) is not None:
        raise typed from error
    raise error
