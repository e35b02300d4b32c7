"""The registry of files and batches in Redis."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from shared import keys
from shared.batch_record import BatchRecord, FileRecord, Progress, Purpose, R, decode, encode
from shared.errors import ForeignDataError, InvalidRequestError, NotFoundError, ServiceUnavailableError
from shared.jobstore import JobStore
from shared.readings import parse_number
from shared.scripts import Call, load

log = structlog.get_logger(__name__)

#: Milliseconds after which a task that shows no sign of life counts as dead.
RUNNING_MS: Final = 15_000
_FILE: Final = re.compile(r"file-[0-9a-f]{32}")
_BATCH: Final = re.compile(r"batch_[0-9a-f]{32}")
_ROUNDS: Final = 100
_PAGE: Final = 100


def new_file_id() -> str:
    """An id that nobody guesses."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """An id that nobody guesses."""
    return f"batch_{secrets.token_hex(16)}"


def made_file_id(batch: str, kind: str) -> str:
    """The id of a batch's output or error file: the same however often it is made."""
    return f"file-{hashlib.blake2b(f'{batch}/{kind}'.encode(), digest_size=16).hexdigest()}"


@dataclass(frozen=True, slots=True)
class BatchesOverview:
    """All batches together.

    Attributes:
        open: batches that have not ended, by status.
        in_flight: lines that are queued or running, as last shown.
        ended: batches that have ended, ever, by status.
        lines: lines that have ended, ever, by outcome: `completed`, `failed`, `expired`, `cancelled`.
    """

    open: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)


def change_call(
    batch_id: str, data: bytes, wanted: bytes, ttl_ms: int, counts: Mapping[str, int] | None = None
) -> Call:
    """Put a batch's record in the place of the one that was read as `data`. `counts` rise with it."""
    key, script = keys.batches(f"batch:{batch_id}"), load("batch_change")
    command = ("EVALSHA", script.sha, 2, key, keys.batches("counts"), data, wanted, ttl_ms, *_pairs(counts))
    return Call(command, key, script)


def advance_call(
    batch_id: str, token: str, progress: Progress, part: str, counts: Mapping[str, int] | None = None
) -> Call:
    """Enter a part of a batch's output, and the lines in it as done. `counts` rise with it."""
    names = [keys.batches(f"{what}:{batch_id}") for what in ("running", "progress", "parts")]
    names.append(keys.batches("counts"))
    script = load("batch_advance")
    arguments = [token, progress.next_line, progress.completed, progress.failed, part, *_pairs(counts)]
    return Call(("EVALSHA", script.sha, len(names), *names, *arguments), names[0], script)


def _read(data: bytes, kind: type[R]) -> R | None:
    """One record of many: one that somebody else wrote must not hide the others."""
    try:
        return decode(data, kind)
    except ForeignDataError as error:
        log.error("record passed over", error=error.message)
        return None


def _pairs(counts: Mapping[str, int] | None) -> list[str | int]:
    return [part for pair in (counts or {}).items() if pair[1] for part in pair]


def _ending(record: BatchRecord) -> dict[str, int]:
    """What the end of a batch adds to the counts."""
    counts = {f"ended_{record.status}": 1}
    if record.status == "cancelled":
        counts["lines_cancelled"] = max(0, record.total - record.completed - record.failed)
    return counts


class Batches(JobStore):
    """A job store with the calls that concern files and batches.

    Every method raises ServiceUnavailableError where Redis is away, ForeignDataError for a record that does not read.
    """

    async def clock_ms(self) -> int:
        """Unix milliseconds of the clock that all times here are of."""
        seconds, microseconds = await self._run(Call(("TIME",), keys.batches("open")))
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def add_file(self, record: FileRecord) -> None:
        """Enter a file whose content is there. Repeating it is harmless."""
        await self._ask("ZADD", keys.batches("files_expire"), record.expires_ms, record.id)
        await self._ask("SET", keys.batches(f"file:{record.id}"), encode(record))
        await self._ask("ZADD", keys.batches(f"files:{record.tenant}"), record.created_ms, record.id)

    async def file(self, file_id: str, tenant: str) -> FileRecord:
        """A tenant's file. Raises NotFoundError, also for one of somebody else."""
        data = await self._record("file", file_id) if _FILE.fullmatch(file_id) else None
        record = None if data is None else decode(data, FileRecord)
        if record is None or record.tenant != tenant or record.expires_ms <= await self.clock_ms():
            raise NotFoundError("No such File object", param="id")
        return record

    async def remove_file(self, file_id: str) -> None:
        """Forget a file whose content is gone."""
        data = await self._record("file", file_id)
        record = None if data is None else _read(data, FileRecord)
        if record is not None:
            await self._ask("ZREM", keys.batches(f"files:{record.tenant}"), file_id)
        await self._ask("DEL", keys.batches(f"file:{file_id}"))
        await self._ask("ZREM", keys.batches("files_expire"), file_id)

    async def expired_files(self, most: int = 100) -> list[str]:
        """Ids of files whose time is over."""
        until = await self.clock_ms()
        found = await self._ask("ZRANGE", keys.batches("files_expire"), "-inf", until, "BYSCORE", "LIMIT", 0, most)
        return [name.decode() for name in found]

    async def files(
        self, tenant: str, *, after: str | None, limit: int, ascending: bool, purpose: Purpose | str | None
    ) -> tuple[list[FileRecord], bool]:
        """A page of a tenant's files, and whether more follow. Raises InvalidRequestError where `after` is none."""
        index, found = keys.batches(f"files:{tenant}"), list[FileRecord]()
        async for data in self._records("file", index, after, ascending):
            record = _read(data, FileRecord)
            if record is not None and (purpose is None or record.purpose == purpose):
                if len(found) == limit:
                    return found, True
                found.append(record)
        return found, False

    async def add_batch(self, record: BatchRecord) -> None:
        """Enter a new batch."""
        await self._ask("SET", keys.batches(f"batch:{record.id}"), encode(record))
        await self._ask("ZADD", keys.batches(f"batches:{record.tenant}"), record.created_ms, record.id)
        await self._ask("SADD", keys.batches("open"), record.id)

    async def batch(self, batch_id: str, tenant: str | None = None) -> BatchRecord:
        """A batch; one of `tenant` where that is said. Raises NotFoundError."""
        data = await self._record("batch", batch_id) if _BATCH.fullmatch(batch_id) else None
        record = None if data is None else decode(data, BatchRecord)
        if record is None or (tenant is not None and record.tenant != tenant):
            raise NotFoundError(f"No batch found with id '{batch_id[:64]}'.", param="id")
        return record

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """A page of a tenant's batches, the newest first, and whether more follow. Raises InvalidRequestError."""
        found: list[BatchRecord] = []
        async for data in self._records("batch", keys.batches(f"batches:{tenant}"), after, False):
            record = _read(data, BatchRecord)
            if record is not None:
                if len(found) == limit:
                    return found, True
                found.append(record)
        return found, False

    async def open_batches(self) -> list[str]:
        """Ids of batches that have not ended."""
        return sorted(name.decode() for name in await self._ask("SMEMBERS", keys.batches("open")))

    async def close_batch(self, batch_id: str) -> None:
        """A batch has ended: what was kept of its way there goes."""
        await self._ask("DEL", keys.batches(f"progress:{batch_id}"), keys.batches(f"parts:{batch_id}"))
        await self._ask("HDEL", keys.batches("counts"), f"in_flight:{batch_id}")
        await self._ask("SREM", keys.batches("open"), batch_id)

    async def change(
        self, batch_id: str, change: Callable[[BatchRecord], BatchRecord], ttl_s: float | None = None
    ) -> BatchRecord:
        """Change a record; answers the one that holds then.

        Args:
            ttl_s: seconds until it goes, where it is one that has ended.

        Raises:
            NotFoundError: it is gone.
        """
        for _ in range(_ROUNDS):
            data = await self._record("batch", batch_id)
            if data is None:
                raise NotFoundError("No such batch", param="id")
            held = decode(data, BatchRecord)
            wanted = change(held)
            if wanted == held:
                return held
            ttl_ms = round(ttl_s * 1e3) if wanted.ended and ttl_s is not None else 0
            counts = _ending(wanted) if wanted.ended and not held.ended else None
            if await self._run(change_call(batch_id, data, encode(wanted), ttl_ms, counts)) == 1:
                return wanted
        raise ServiceUnavailableError("the batch is being changed all the time", retry_after=1.0)

    async def progress(self, batch_id: str) -> Progress:
        """How far a batch is."""
        held: dict[bytes, bytes] = await self._ask("HGETALL", keys.batches(f"progress:{batch_id}"))
        try:
            return Progress(**{name.decode(): int(value) for name, value in held.items()})
        except (TypeError, ValueError) as error:
            raise ForeignDataError(f"a batch's progress is not one that was written here: {error}") from None

    async def show(self, batch_id: str, completed: int, failed: int, in_flight: int) -> None:
        """Tell how many lines are done, of which some are in no part yet, and how many are queued or running."""
        key = keys.batches(f"progress:{batch_id}")
        await self._ask("HSET", key, "seen_completed", completed, "seen_failed", failed)
        await self._ask("HSET", keys.batches("counts"), f"in_flight:{batch_id}", in_flight)

    async def count_death(self, batch_id: str) -> int:
        """Count that whoever was at a batch died; how often that was since it last came further."""
        return int(await self._ask("HINCRBY", keys.batches(f"progress:{batch_id}"), "deaths", 1))

    async def parts(self, batch_id: str) -> list[str]:
        """Names of the parts of a batch's output, in order."""
        return [name.decode() for name in await self._ask("LRANGE", keys.batches(f"parts:{batch_id}"), 0, -1)]

    async def begin(self, batch_id: str, token: str) -> bool:
        """Whether the caller is at a batch from now on, for `RUNNING_MS`; False where somebody else is."""
        return bool(await self._ask("SET", keys.batches(f"running:{batch_id}"), token, "NX", "PX", RUNNING_MS))

    async def is_running(self, batch_id: str) -> bool:
        """Whether somebody is at a batch."""
        return bool(await self._ask("EXISTS", keys.batches(f"running:{batch_id}")))

    async def stay(self, batch_id: str, token: str) -> bool:
        """Say that the caller is at a batch still; False where it is not any more."""
        key = keys.batches(f"running:{batch_id}")
        if await self._ask("GET", key) != token.encode():
            return False
        return bool(await self._ask("PEXPIRE", key, RUNNING_MS))

    async def leave(self, batch_id: str, token: str) -> None:
        """The caller is at a batch no more."""
        key = keys.batches(f"running:{batch_id}")
        if await self._ask("GET", key) == token.encode():
            await self._ask("DEL", key)

    async def advance(
        self, batch_id: str, token: str, progress: Progress, part: str, outcomes: Mapping[str, int] | None = None
    ) -> bool:
        """Enter a part whose content is there (empty for none); False where the caller is not at the batch any more.

        `outcomes` are the lines of that part, see `BatchesOverview`.
        """
        counts = {f"lines_{outcome}": lines for outcome, lines in (outcomes or {}).items()}
        return bool(await self._run(advance_call(batch_id, token, progress, part, counts)))

    async def overview(self) -> BatchesOverview:
        """All batches together; records that do not read are left out."""
        ids = await self.open_batches()
        names = [keys.batches(f"batch:{batch_id}") for batch_id in ids]
        records = await self._ask("MGET", *names) if names else []
        held: dict[bytes, bytes] = await self._ask("HGETALL", keys.batches("counts"))
        counts = {name.decode(errors="replace"): parse_number(value) for name, value in held.items()}

        def of(prefix: str) -> Counter[str]:
            return Counter({name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)})

        read = [_read(data, BatchRecord) for data in records if data is not None]
        return BatchesOverview(
            open=Counter(record.status for record in read if record is not None),
            in_flight=sum(counts.get(f"in_flight:{batch_id}", 0) for batch_id in ids),
            ended=of("ended_"),
            lines=of("lines_"),
        )

    async def _record(self, kind: str, name: str) -> bytes | None:
        data: bytes | None = await self._ask("GET", keys.batches(f"{kind}:{name}"))
        return data

    async def _records(self, kind: str, index: str, after: str | None, ascending: bool) -> Any:
        """Records of an index in order; ids whose records have expired are dropped from it."""
        start = 0
        if after is not None:
            rank = await self._ask("ZRANK" if ascending else "ZREVRANK", index, after)
            if rank is None:
                raise InvalidRequestError("after: there is no such object", param="after")
            start = rank + 1
        while ids := await self._ask("ZRANGE" if ascending else "ZREVRANGE", index, start, start + _PAGE - 1):
            names: Sequence[str] = [keys.batches(f"{kind}:{name.decode()}") for name in ids]
            values = await self._ask("MGET", *names)
            gone = [name for name, value in zip(ids, values, strict=True) if value is None]
            if gone:
                await self._ask("ZREM", index, *gone)
            for value in values:
                if value is not None:
                    yield value
            start += len(ids) - len(gone)
