"""The registry of adapters: names of all pools, what they stand for, and which contents nobody needs any more.

Every change is one script call that fails where somebody else was quicker; then it is decided anew. A name's record is
read at each submit, so no gateway ever knows an old one.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from shared import adapter_calls, keys
from shared.adapter_record import AdapterRecord, Content, PendingLoad, decode_record, salvage
from shared.errors import (
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    ServiceUnavailableError,
    VersionError,
)
from shared.jobstore import JobStore
from shared.scripts import Call

log = structlog.get_logger(__name__)

#: Most names, where a caller sets no other limit.
MAX_NAMES: Final = 10_000
#: Most of an error's text that is kept: it may show what a file holds.
_ERROR_CHARACTERS: Final = 1000
#: Tries of a change that others keep changing.
_ROUNDS: Final = 100

#: Of a record as it is, the one that is to be; None for no record.
Change = Callable[[AdapterRecord | None], AdapterRecord | None]


class Begun(NamedTuple):
    """A load that was asked for.

    Attributes:
        began: whether this call began it: not where one of the same source is under way already.
        overtaken: the load whose place it has taken.
    """

    record: AdapterRecord
    began: bool
    overtaken: PendingLoad | None


class AdapterLoadedError(InvalidRequestError):
    """The name is in use, and nobody asked for its content to be replaced."""

    code = "adapter_loaded"


class Adapters(JobStore):
    """A job store with the calls that concern adapters' names.

    Every method raises ServiceUnavailableError where Redis is away.
    """

    async def find(self, name: str) -> AdapterRecord | None:
        """A name's record; None for an unknown one. Raises ProtocolError where it does not read."""
        data = await self._ask("HGET", keys.adapters("names"), name)
        return None if data is None else decode_record(data)

    async def records(self, pool: str | None = None) -> list[AdapterRecord]:
        """Records of all names, or of a pool's, sorted by name. Those that do not read are left out, and logged."""
        return _readable((await self._ask("HGETALL", keys.adapters("names"))).values(), pool)

    async def drained(self, pool: str | None = None) -> list[AdapterRecord]:
        """What names stood for that are unloaded, as long as `forget_drained` has not been told that no job pins it."""
        return _readable((await self._ask("HGETALL", keys.adapters("draining"))).values(), pool)

    async def revision(self) -> int:
        """A number that rises with every change of any name."""
        return int(await self._ask("GET", keys.adapters("revision")) or 0)

    async def in_flight(self, pool: str, lanes: int) -> Counter[str]:
        """Jobs of a pool, queued or running, by the identity that they pin."""
        found: Counter[str] = Counter()
        calls = [Call(("HGETALL", keys.stats(pool, lane)), keys.stats(pool, lane)) for lane in range(lanes)]
        for answer in await self._run_all(calls):
            if isinstance(answer, Exception):
                raise answer
            for field, value in answer.items():
                if field.startswith(b"a:") and value.isdigit():
                    found[field[2:].decode(errors="replace")] += int(value)
        return found

    async def begin(self, name: str, pool: str, pending: PendingLoad, *, replace: bool, most: int = MAX_NAMES) -> Begun:
        """Note that a load is asked for. While it is under way, and if it fails, what the name stands for goes on.

        Args:
            pending: `version` is set here.
            replace: also where the name has a content already, or another load under way.

        Raises:
            AdapterLoadedError: the name has a content.
            ConflictError: it belongs to another pool, or another load is under way.
            OverloadedError: there are `most` names.
        """
        began, overtaken = False, None

        def change(held: AdapterRecord | None) -> AdapterRecord:
            nonlocal began, overtaken
            began, overtaken = False, None
            if held is None:
                held = AdapterRecord(name=name, pool=pool, created_ms=pending.since_ms)
            _check_pool(held, pool)
            if held.pending is not None and held.pending.source == pending.source:
                return held
            if held.content is not None and not replace:
                raise AdapterLoadedError(
                    f"The lora adapter '{name}' has already been loaded. To load it in place, "
                    "set 'load_inplace' to true",
                    param="lora_name",
                )
            if held.pending is not None and not replace:
                raise ConflictError(f"another load of adapter '{name}' is under way", param="lora_name")
            began, overtaken = True, held.pending
            return msgspec.structs.replace(
                held,
                pool=pool,
                pending=msgspec.structs.replace(pending, version=held.next_version),
                next_version=held.next_version + 1,
            )

        record = await self._change(name, change, most)
        assert record is not None
        return Begun(record, began, overtaken)

    async def restart(self, name: str, version: int, since_ms: int) -> PendingLoad | None:
        """Count that a load is begun anew; None where it is not under way any more."""

        def change(held: AdapterRecord | None) -> AdapterRecord | None:
            if held is None or held.pending is None or held.pending.version != version:
                return held
            pending = msgspec.structs.replace(held.pending, starts=held.pending.starts + 1, since_ms=since_ms)
            return msgspec.structs.replace(held, pending=pending)

        record = await self._change(name, change)
        pending = None if record is None else record.pending
        return pending if pending is not None and pending.version == version else None

    async def finish(self, name: str, version: int, content: Content, loaded_ms: int) -> bool:
        """Have a name stand for what was loaded. False: the load has been overtaken, or the name unloaded."""
        done = False

        def change(held: AdapterRecord | None) -> AdapterRecord | None:
            nonlocal done
            done = held is not None and (held.version == version or _is_pending(held, version))
            if held is None or held.pending is None or held.pending.version != version:
                return held
            return msgspec.structs.replace(
                held,
                version=version,
                content=content,
                source=held.pending.source,
                pinned=held.pending.pinned,
                error=None,
                loaded_ms=loaded_ms,
                pending=None,
            )

        await self._change(name, change)
        return done

    async def put_off(self, name: str, version: int, error: str) -> None:
        """Note why a try of a load has failed that is tried again later."""

        def change(held: AdapterRecord | None) -> AdapterRecord | None:
            if held is None or held.pending is None or held.pending.version != version:
                return held
            pending = msgspec.structs.replace(held.pending, error=error[:_ERROR_CHARACTERS])
            return msgspec.structs.replace(held, pending=pending)

        await self._change(name, change)

    async def fail(self, name: str, version: int, error: str) -> bool:
        """Note why a load has failed. False: it has been overtaken, or the name unloaded."""
        done = False

        def change(held: AdapterRecord | None) -> AdapterRecord | None:
            nonlocal done
            done = held is not None and _is_pending(held, version)
            if held is None or not done:
                return held
            return msgspec.structs.replace(held, error=error[:_ERROR_CHARACTERS], pending=None)

        await self._change(name, change)
        return done

    async def remove(self, name: str) -> AdapterRecord | None:
        """Forget a name: at once for new jobs. Answers the record that it had; None: there was none.

        Of a record that does not read, what of it does is answered.
        """
        removed: AdapterRecord | None = None
        for _ in range(_ROUNDS):
            data: bytes = await self._ask("HGET", keys.adapters("names"), name) or b""
            if not data:
                return removed
            removed = _decoded(name, data, strict=False) or salvage(name, data)
            if await self._run(adapter_calls.write(name, data, removed, None, 0)) == 1:
                return removed
        raise _restless(name)

    async def forget_drained(self, record: AdapterRecord) -> None:
        """No job pins any more what an unloaded name stood for."""
        await self._ask("HDEL", keys.adapters("draining"), adapter_calls.draining_field(record))

    async def loading(self, name: str, version: int, seconds: float) -> None:
        """Say that somebody is at a load, for so many seconds."""
        await self._ask("SET", _loading_key(name, version), b"1", "PX", max(1, round(seconds * 1e3)))

    async def is_loading(self, name: str, version: int) -> bool:
        """Whether somebody is at a load now."""
        return bool(await self._ask("EXISTS", _loading_key(name, version)))

    async def tasks_alive(self, seconds: float) -> None:
        """Say that a process that loads adapters is there, for so many seconds."""
        await self._ask("SET", keys.adapters("tasks"), b"1", "PX", max(1, round(seconds * 1e3)))

    async def lock_keeper(self, owner: str, seconds: float) -> bool:
        """Whether the caller is to look after all loads now; nobody else is for so many seconds."""
        milliseconds = max(1, round(seconds * 1e3))
        return bool(await self._ask("SET", keys.adapters("keeper"), owner, "NX", "PX", milliseconds))

    async def any_tasks(self) -> bool:
        """Whether a process that loads adapters is there."""
        return bool(await self._ask("EXISTS", keys.adapters("tasks")))

    async def keep(self, identity: str) -> bool:
        """Before a content is put into the store: it is kept as one that a name has just left.

        Returns:
            False while it is being deleted: try again in a moment.
        """
        return bool(await self._run(adapter_calls.keep(identity)))

    async def unused(self, until_ms: int) -> dict[str, int]:
        """Contents that no name has pointed to since a time (Unix ms of Redis's clock) or longer; since when each."""
        found = await self._ask("ZRANGEBYSCORE", keys.adapters("unused"), "-inf", until_ms, "WITHSCORES")
        pairs = zip(found[::2], found[1::2], strict=True)
        return {name.decode(errors="replace"): int(float(since)) for name, since in pairs}

    async def may_delete(self, identity: str, since_ms: int) -> bool:
        """Mark a content as being deleted, if nobody has wanted it since; until `deleted`, or for ten minutes."""
        return await self._drop(identity, since_ms, "delete")

    async def deleted(self, identity: str, since_ms: int) -> None:
        """The content is gone."""
        await self._drop(identity, since_ms, "deleted")

    async def is_used(self, identity: str, since_ms: int) -> None:
        """Some name does point to the content; it is looked at again when that leaves it."""
        await self._drop(identity, since_ms, "used")

    async def clock_ms(self) -> int:
        """Unix milliseconds of the clock that `unused` goes by."""
        seconds, microseconds = await self._run(Call(("TIME",), keys.adapters("unused")))
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _drop(self, identity: str, since_ms: int, step: adapter_calls.Step) -> bool:
        return bool(await self._run(adapter_calls.drop(identity, since_ms, step)))

    async def _change(self, name: str, change: Change, most: int = MAX_NAMES) -> AdapterRecord | None:
        """Change a record; answers the one that holds then. A change that answers what it got writes nothing."""
        for _ in range(_ROUNDS):
            data: bytes = await self._ask("HGET", keys.adapters("names"), name) or b""
            held = _decoded(name, data)
            wanted = change(held)
            if wanted == held:
                return held
            if wanted is not None:
                wanted = msgspec.structs.replace(wanted, stamp=secrets.token_hex(8))
            code = await self._run(adapter_calls.write(name, data, held, wanted, most))
            if code == 1:
                return wanted
            if code == 2:
                raise OverloadedError(f"{most} adapters are registered, no more are allowed (max_adapters)")
        raise _restless(name)


def _restless(name: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(f"adapter '{name}' is being changed all the time", retry_after=1.0)


def _loading_key(name: str, version: int) -> str:
    return keys.adapters(f"loading:{name}@{version}")


def _check_pool(held: AdapterRecord, pool: str) -> None:
    if held.pool != pool and (held.content is not None or held.pending is not None):
        raise ConflictError(
            f"adapter '{held.name}' belongs to the base model {held.pool}; unload it first", param="base_model"
        )


def _is_pending(held: AdapterRecord, version: int) -> bool:
    return held.pending is not None and held.pending.version == version


def _decoded(name: str, data: bytes, *, strict: bool = True) -> AdapterRecord | None:
    """A record that is to be changed; one that does not read is as none, so that an operator can load the name anew.

    Raises:
        VersionError: it is of another version; only where that is to be heard of (`strict`).
    """
    if not data:
        return None
    try:
        return decode_record(data)
    except ProtocolError as error:
        if strict and isinstance(error, VersionError):
            raise
        log.error("adapters.record_unreadable", name=name, error=error.message)
        return None


def _readable(values: Any, pool: str | None) -> list[AdapterRecord]:
    found = []
    for data in values:
        try:
            record = decode_record(data)
        except ProtocolError as error:  # one that does not read must not hide the others
            log.error("adapters.record_unreadable", error=error.message)
            continue
        if pool is None or record.pool == pool:
            found.append(record)
    return sorted(found, key=lambda record: (record.name, record.version))
