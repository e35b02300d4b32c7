"""What nobody's job is in the course of a job: sweeps, dead letters, pausing a pool. For gateways and operators."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from shared import keys, readings, scripts
from shared.calls import primaries, run
from shared.errors import ConflictError, ForeignDataError, JobNotFoundError, ProtocolError, RopewayError
from shared.jobs import DeadLetter, Lease, Lifetime
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import Envelope, decode
from shared.redis_errors import TROUBLE, typed
from shared.scripts import Call

#: Entries that one call looks at, so that none holds Redis up for long.
_PAGE: Final = 200
_LEASE: Final = Lease()


@dataclass(slots=True)
class Swept:
    """What a sweep of one lane did.

    Attributes:
        ended: jobs that ended: `expired`, `cancelled`, or `lost` where there was only an entry.
        started: delayed jobs whose time had come and that were queued.
        recounted: counters that did not agree with the streams were counted anew.
        forgotten: consumers deleted whose worker is gone, and on which nothing was pending.
        broken: what could not be done, because somebody else wrote into the lane's keys.
    """

    ended: dict[str, str] = field(default_factory=dict)
    started: int = 0
    recounted: bool = False
    forgotten: int = 0
    broken: list[ForeignDataError] = field(default_factory=list)


@dataclass(slots=True)
class Orphaned:
    """What became of a dead worker's jobs.

    Attributes:
        queued: how many wait for another worker now.
        ended: jobs that ended instead: `cancelled`, `expired`, or `failed` where they were buried.
    """

    queued: int = 0
    ended: dict[str, str] = field(default_factory=dict)


class Upkeep(JobStore):
    """A job store with the calls that look after pools as a whole. All of them may be repeated."""

    async def sweep_lane(self, pool: str, lane: int, slack_s: float) -> Swept:
        """End jobs of a lane that are past their deadline, also where no worker lives; drop what nobody stands behind.

        What cannot be done of it keeps nothing else from being done.

        Args:
            slack_s: seconds that a running job may outlive its deadline: its worker ends it, if it lives.
        """
        swept = Swept()
        steps: list[Callable[[str, int, Swept], Awaitable[None]]]
        steps = [partial(self._sweep_stream, stream, slack_s) for stream in keys.lane_streams(pool, lane)]
        for step in (self._start_due, *steps, self._recount, self._forget_dead):
            try:
                await step(pool, lane, swept)
            except ForeignDataError as error:
                swept.broken.append(error)
        return swept

    async def _sweep_stream(self, stream: str, slack_s: float, pool: str, lane: int, swept: Swept) -> None:
        first = "-"
        while first:
            page, *ended = await self._run(scripts.sweep(pool, lane, stream, first, _PAGE, round(slack_s * 1e3)))
            pairs = zip(ended[::2], ended[1::2], strict=True)
            swept.ended |= {job.decode(errors="replace"): status.decode() for job, status in pairs}
            first = f"({page.decode()}" if page else ""

    async def _start_due(self, pool: str, lane: int, swept: Swept) -> None:
        started = _PAGE
        while started == _PAGE:
            started = len(await self._run(scripts.due(pool, lane, _PAGE)))
            swept.started += started

    async def _recount(self, pool: str, lane: int, swept: Swept) -> None:
        swept.recounted = bool(await self._run(scripts.recount(pool, lane)))

    async def _forget_dead(self, pool: str, lane: int, swept: Swept) -> None:
        live = [owner.decode(errors="replace") for owner in await self._ask("ZRANGE", keys.workers(pool), 0, -1)]
        swept.forgotten = await self._run(scripts.forget_dead(pool, lane, live))

    async def restore(self, job_id: str) -> bool:
        """Put a live job back into its queue if no stream holds it. True: it was not there."""
        parsed = JobId.parse(job_id)
        stream = await self._ask("HGET", keys.job(parsed), "stream")
        if stream is None:
            return False
        return bool(await self._run(scripts.restore(parsed, stream.decode(errors="replace"))))

    async def orphan(
        self, pool: str, owner: str, lanes: int, *, max_attempts: int = _LEASE.max_attempts, charge: bool = True
    ) -> Orphaned:
        """Queue a dead worker's jobs again at once, rather than when its lease runs out, and take it off the registry.

        Only for who knows that it is dead, as its parent does. Should it live all the same it is fenced: nothing is
        lost but what it was computing.

        Args:
            charge: count its death against its jobs, as where a lease runs out.

        Raises:
            ForeignDataError: somebody else wrote into a lane's keys. The other lanes were done.
        """
        found = Orphaned()
        left, broken = list(range(lanes)), []
        while left:
            calls = [scripts.orphan(pool, lane, owner, max_attempts, charge=charge, count=_PAGE) for lane in left]
            more = []
            for lane, answer in zip(left, await self._run_all(calls), strict=True):
                if isinstance(answer, RopewayError):
                    broken.append(answer)
                    continue
                again, queued, ended, _ = answer
                found.queued += queued
                pairs = zip(ended[::2], ended[1::2], strict=True)
                found.ended |= {job.decode(errors="replace"): status.decode() for job, status in pairs}
                more += [lane] if again else []
            left = more
        if broken:
            raise broken[0]
        await self.leave(pool, owner)
        await self.forget(pool, owner, lanes)
        return found

    async def job_ids(self, pool: str) -> AsyncIterator[str]:
        """Ids of all jobs of a pool that Redis holds, ended ones included. Walks the whole key space."""
        try:
            for node in await primaries(self._redis):
                async for key in node.scan_iter(match=f"rw:{{{pool}.*}}:job:*", count=1000):
                    job_id = key.decode(errors="replace").partition("}:job:")[2]
                    if (parsed := JobId.match(job_id)) is not None and parsed.pool == pool:
                        yield job_id
        except TROUBLE as error:
            raise typed(error) from error

    async def lock_sweep(self, pool: str, owner: str, seconds: float) -> bool:
        """Whether the caller may sweep the pool now; nobody else may for so many seconds."""
        milliseconds = max(1, round(seconds * 1e3))
        return bool(await self._ask("SET", keys.sweep_lock(pool), owner, "NX", "PX", milliseconds))

    async def pause(self, pool: str) -> None:
        """Let the pool's workers take no further job; what runs goes on, and jobs are still accepted."""
        await self._ask("SET", keys.paused(pool), b"1")
        await self._ask("PUBLISH", keys.control(pool), msgspec.msgpack.encode({"op": "pause"}))

    async def unpause(self, pool: str) -> None:
        """Let the pool's workers take jobs again."""
        await self._ask("DEL", keys.paused(pool))
        await self._ask("PUBLISH", keys.control(pool), msgspec.msgpack.encode({"op": "unpause"}))

    async def heartbeats(self, pool: str) -> dict[str, float]:
        """Seconds since each worker of the registry was heard of, by owner; those that were forgotten are left out."""
        now = await self.now_ms(pool)
        beats = await self._ask("ZRANGE", keys.workers(pool), 0, -1, "WITHSCORES")
        pairs = zip(beats[::2], beats[1::2], strict=True)
        return {owner.decode(errors="replace"): (now - float(beat)) / 1e3 for owner, beat in pairs}

    async def holders(self, pool: str, lanes: int) -> dict[str, int]:
        """How many jobs each owner has, by owner, whether or not it lives."""
        streams = [stream for lane in range(lanes) for stream in keys.lane_streams(pool, lane)]
        calls = [Call(("XPENDING", stream, keys.GROUP), stream) for stream in streams]
        found: dict[str, int] = {}
        for answer in await run(self._redis, calls):
            if isinstance(answer, Exception):
                if not str(answer).startswith("NOGROUP"):  # where nothing was ever queued
                    raise typed(answer)
                continue
            for consumer in answer["consumers"]:
                name = consumer["name"].decode(errors="replace")
                found[name] = found.get(name, 0) + int(consumer["pending"])
        return found

    async def find_dead(self, job_id: str) -> DeadLetter:
        """A buried job.

        Raises:
            JobNotFoundError: no dead letter is of this job.
        """
        parsed = JobId.parse(job_id)
        async for letter in self.all_dead(parsed.pool, parsed.lane):
            if letter.job_id == job_id:
                return letter
        raise JobNotFoundError("no dead letter is of this job", param="id")

    async def all_dead(self, pool: str, lane: int) -> AsyncIterator[DeadLetter]:
        """Every dead letter of a lane, the newest first."""
        last = "+"
        while last:
            entries = await self._ask("XREVRANGE", keys.dead(pool, lane), last, "-", "COUNT", _PAGE)
            for entry, fields in entries:
                yield readings.parse_dead_letter(entry, fields)
            last = f"({entries[-1][0].decode()}" if len(entries) == _PAGE else ""

    async def retry_dead(self, job_id: str, lifetime: Lifetime | None = None) -> str:
        """Submit a buried job once more, as a new one, and remove its dead letter.

        Called again after a crash in between it makes no second job: the new id follows from the letter.

        Returns:
            The new job's id.

        Raises:
            JobNotFoundError: no dead letter is of this job.
            ConflictError: its envelope does not decode.
            OverloadedError: the lane is full; the letter stays.
        """
        letter = await self.find_dead(job_id)
        try:
            envelope = copy.copy(decode(letter.envelope, Envelope))
        except ProtocolError as error:
            raise ConflictError("the job's envelope does not decode, so it cannot be run again") from error
        parsed = JobId.parse(job_id)
        unique = hashlib.blake2b(f"{letter.entry}/{job_id}".encode(), digest_size=10).hexdigest()
        envelope.id = str(JobId(parsed.pool, parsed.lane, f"{letter.buried_ms:012x}{unique}"))
        await self.submit(envelope, lifetime=lifetime)
        await self.purge_dead(letter)
        return envelope.id

    async def purge_dead(self, letter: DeadLetter) -> None:
        """Remove one dead letter."""
        parsed = JobId.parse(letter.job_id)
        await self._ask("XDEL", keys.dead(parsed.pool, parsed.lane), letter.entry)
