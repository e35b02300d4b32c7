"""Loading and unloading adapters, and how they are shown."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import structlog

from gateway.catalogue import WORKER_TTL_MS, Catalogue, Pool
from shared.adapter_record import AdapterRecord, PendingLoad
from shared.adapter_store import discard_upload, open_store
from shared.adapters import Adapters
from shared.errors import (
    AdapterError,
    InvalidRequestError,
    ModelNotFoundError,
    RopewayError,
    ServiceUnavailableError,
)
from shared.lora.files import NAME_PATTERN
from shared.lora.source import parse_source
from shared.protocol import WorkerInfo
from shared.settings import GatewaySettings
from shared.task_queue import TaskQueue, tasks_url

log = structlog.get_logger(__name__)

State = Literal["registered", "loading", "resident", "failed", "draining"]
#: Seconds between looks whether a load has ended.
_LOOK_S: Final = 0.1
_LONGEST_LOOK_S: Final = 1.0
#: Seconds that RQ leaves one try; the tasks process has a limit of its own.
_TASK_TIMEOUT_S: Final = 24 * 3600
#: Most characters of a failure that one worker tells of.
_ERROR_CHARACTERS: Final = 500


class AdapterView(msgspec.Struct, kw_only=True, omit_defaults=False):
    """An adapter as it is shown. Times are Unix seconds, null where not yet."""

    id: str
    object: str = "adapter"
    base_model: str
    state: State
    error: str | None = None
    version: int
    identity: str | None = None
    revision: str | None = None
    rank: int | None = None
    bytes: int | None = None
    pinned: bool = False
    in_flight: int = 0
    workers: int = 0
    created_at: int | None = None
    loaded_at: int | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load as it is asked for; `source` may be an upload's."""

    name: str
    source: str
    base_model: str | None = None
    replace: bool = False
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class _PoolState:
    """What is known of a pool's adapters beyond their records."""

    workers: Sequence[WorkerInfo]
    in_flight: Counter[str]


class AdapterDesk:
    """What the routes about adapters do."""

    def __init__(self, adapters: Adapters, catalogue: Catalogue, settings: GatewaySettings) -> None:
        self._adapters, self._catalogue, self._settings = adapters, catalogue, settings
        self._queue: TaskQueue | None = None

    def close(self) -> None:
        """Close the connections to the queue of tasks."""
        if self._queue is not None:
            self._queue.close()

    async def records(self) -> list[AdapterRecord]:
        """Adapters that jobs may name."""
        return [record for record in await self._adapters.records() if record.content is not None]

    async def views(self, *, sources: bool) -> list[AdapterView]:
        """All adapters, those that drain too; `sources`: with where they came from."""
        records = await self._adapters.records()
        names = {record.name for record in records}
        drained = [record for record in await self._adapters.drained() if record.name not in names]
        states = {pool: await self._state_of(pool) for pool in {record.pool for record in (*records, *drained)}}
        views = [_view(record, states[record.pool], sources) for record in records]
        views += [_draining(record, states[record.pool], sources) for record in drained]
        hint = None if await self._adapters.any_tasks() else _no_tasks()
        for view in views:
            if view.state == "loading" and view.error is None:
                view.error = hint
        return sorted((view for view in views if view.state != "draining" or view.in_flight), key=lambda view: view.id)

    async def view(self, name: str, *, sources: bool) -> AdapterView:
        """One adapter. Raises ModelNotFoundError."""
        record = await self._adapters.find(name) if NAME_PATTERN.fullmatch(name) else None
        if record is not None:
            view = _view(record, await self._state_of(record.pool), sources)
            if view.state == "loading" and view.error is None and not await self._adapters.any_tasks():
                view.error = _no_tasks()
            return view
        for drained in reversed(await self._adapters.drained()):
            if drained.name == name:
                view = _draining(drained, await self._state_of(drained.pool), sources)
                if view.in_flight:
                    return view
        raise unknown_adapter(name)

    async def check(self, order: LoadOrder) -> Pool:
        """Everything that can be refused at once; answers the pool.

        Raises:
            InvalidRequestError: a name, a source or a base model that cannot be.
            ServiceUnavailableError: Redis is away, or none is set for tasks.
        """
        if NAME_PATTERN.fullmatch(order.name) is None:
            raise InvalidRequestError("lora_name: letters, digits, `._-` and one slash at most", param="lora_name")
        await self._catalogue.refresh_if_empty()
        if self._catalogue.known(order.name) is not None or order.name in await self._adapters.pools():
            raise InvalidRequestError(f"lora_name: '{order.name}' is the name of a base model", param="lora_name")
        self._task_queue()
        return await self._pool(order.base_model)

    async def load(self, order: LoadOrder) -> AdapterRecord:
        """Have an adapter loaded; it is under way when this answers.

        Raises:
            AdapterLoadedError, ConflictError, OverloadedError: see `Adapters.begin`.
            InvalidRequestError, ServiceUnavailableError: see `check`.
        """
        pool = await self.check(order)
        parse_source(order.source, uploads=True)
        pending = PendingLoad(
            version=0, source=order.source, pinned=order.pinned, since_ms=await self._adapters.clock_ms()
        )
        record, began, overtaken = await self._adapters.begin(
            order.name, pool.card.pool, pending, replace=order.replace, most=self._settings.max_adapters
        )
        await self._drop_upload(overtaken)
        if began and record.pending is not None:
            log.info("adapter.load", adapter=order.name, version=record.pending.version, pool=pool.card.pool)
            await self._enqueue(record.name, record.pending)
        return record

    async def wait(self, record: AdapterRecord, seconds: float) -> None:
        """Until the load that a record tells of has ended.

        Raises:
            AdapterError: it has failed.
            ModelNotFoundError: the name was unloaded meanwhile.
            ServiceUnavailableError: it has not ended in time; it goes on.
        """
        if record.pending is None:
            return
        version, until, pause = record.pending.version, time.monotonic() + seconds, _LOOK_S
        while True:
            held = await self._adapters.find(record.name)
            if held is None:
                raise unknown_adapter(record.name)
            if held.version >= version:
                return
            if held.pending is None:
                raise AdapterError(held.error or "the load has failed")
            if held.pending.version != version:
                raise AdapterError("another load of this name has taken the place of this one")
            if time.monotonic() >= until:
                why = _no_tasks() if not await self._adapters.any_tasks() else _trying(held.pending) or "it goes on"
                raise ServiceUnavailableError(f"the load of '{record.name}' has not ended yet: {why}", retry_after=10.0)
            await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(pause * 1.5, _LONGEST_LOOK_S)

    async def unload(self, name: str) -> int:
        """Forget a name at once; answers how many jobs go on with its content. Raises ModelNotFoundError."""
        record = await self._adapters.remove(name) if NAME_PATTERN.fullmatch(name) else None
        if record is None:
            raise unknown_adapter(name)
        await self._drop_upload(record.pending)
        log.info("adapter.unload", adapter=name, version=record.version, pool=record.pool)
        state = await self._state_of(record.pool)
        return state.in_flight[record.identity or ""]

    async def _enqueue(self, name: str, pending: PendingLoad) -> None:
        """Put the task into its queue; where that fails, a tasks process finds the record and does it."""
        try:
            await asyncio.to_thread(self._task_queue().load_adapter, name, pending)
        except RopewayError as error:
            log.warning("adapter.task_not_queued", adapter=name, error=error.message)

    async def _drop_upload(self, overtaken: PendingLoad | None) -> None:
        """What a load that nobody waits for any more was to be made of goes at once, if it was uploaded."""
        if overtaken is not None:
            await asyncio.to_thread(discard_upload, overtaken.source, lambda: open_store(self._settings.adapter_store))

    def _task_queue(self) -> TaskQueue:
        if self._queue is None:
            try:
                self._queue = TaskQueue(tasks_url(self._settings), _TASK_TIMEOUT_S)
            except InvalidRequestError as error:
                raise ServiceUnavailableError(error.message) from None
        return self._queue

    async def _pool(self, base_model: str | None) -> Pool:
        if base_model is not None:
            try:
                pool = await self._catalogue.find(base_model)
            except ModelNotFoundError:
                raise ModelNotFoundError(
                    "base_model: no model with this name is served here, see /v1/models", param="base_model"
                ) from None
            if not pool.card.max_lora_rank:
                raise InvalidRequestError(_serves_none(base_model), param="base_model")
            return pool
        pools = self._catalogue.pools
        able = [pool for pool in pools if pool.card.max_lora_rank]
        if len(able) == 1:
            return able[0]
        if able:
            names = ", ".join(pool.card.pool for pool in able)
            raise InvalidRequestError(f"base_model: must be one of {names}", param="base_model")
        raise InvalidRequestError(
            _serves_none(pools[0].card.pool) if len(pools) == 1 else "base_model: no model here serves adapters",
            param="base_model",
        )

    async def _state_of(self, pool: str) -> _PoolState:
        card = await self._adapters.get_card(pool)
        if card is None:
            return _PoolState((), Counter())
        workers = await self._adapters.live_workers(pool, WORKER_TTL_MS)
        return _PoolState(workers, await self._adapters.in_flight(pool, card.lanes))


def unknown_adapter(name: str) -> ModelNotFoundError:
    """What is said of a name that is none. It is shown only where it could be one."""
    shown = f"'{name}' " if NAME_PATTERN.fullmatch(name) else ""
    return ModelNotFoundError(f"The lora adapter {shown}cannot be found.", param="lora_name")


def _serves_none(pool: str) -> str:
    return f"base_model: {pool} serves no adapters; its workers need ROPEWAY_ENABLE_LORA=true"


def _no_tasks() -> str:
    return "no process loads adapters now: `ropeway tasks` is one"


def _view(record: AdapterRecord, pool: _PoolState, sources: bool) -> AdapterView:
    identity = record.identity
    resident = sum(identity in (*w.adapters, *w.adapters_in_memory) for w in pool.workers) if identity else 0
    reading = any(identity in w.adapters_loading for w in pool.workers) if identity else False
    failures = _failures(record, pool.workers)
    state: State
    error = record.error
    if record.pending is not None:
        state, error = "loading", _trying(record.pending) or error
    elif identity is None:
        state = "failed"
    elif resident:
        state = "resident"
    elif reading:
        state = "loading"
    elif failures:
        state, error = "failed", failures[0][:_ERROR_CHARACTERS]
    else:
        state = "registered"
    fields: dict[str, Any] = _fields(record, pool, sources)
    return AdapterView(**fields, state=state, error=error, workers=resident)


def _trying(pending: PendingLoad) -> str | None:
    """Why a load has not ended at the first try."""
    return None if pending.error is None else f"{pending.error}; it is tried again"


def _failures(record: AdapterRecord, workers: Sequence[WorkerInfo]) -> list[str]:
    """Why workers could not read what a name stands for, since it was loaded: a load may have mended what it was."""
    identity = record.identity
    if identity is None:
        return []
    return [
        worker.adapters_failed[identity]
        for worker in workers
        if identity in worker.adapters_failed
        and worker.adapters_failed_ms.get(identity, record.loaded_ms) >= record.loaded_ms
    ]


def _draining(record: AdapterRecord, pool: _PoolState, sources: bool) -> AdapterView:
    return AdapterView(**_fields(record, pool, sources), state="draining")


def _fields(record: AdapterRecord, pool: _PoolState, sources: bool) -> dict[str, Any]:
    content, pending = record.content, record.pending
    return {
        "id": record.name,
        "base_model": record.pool,
        "version": record.version,
        "identity": record.identity,
        "revision": None if content is None else content.revision,
        "rank": None if content is None else content.rank,
        "bytes": None if content is None else content.bytes,
        "pinned": record.pinned if content is not None or pending is None else pending.pinned,
        "in_flight": pool.in_flight[record.identity or ""],
        "created_at": record.created_ms // 1000 or None,
        "loaded_at": record.loaded_ms // 1000 or None,
        "source": (record.source or (pending.source if pending is not None else None)) if sources else None,
    }
