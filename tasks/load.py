"""Loading one adapter: fetch, check, keep by its content, and only then have its name stand for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from shared.adapter_record import Content, PendingLoad
from shared.adapter_store import AdapterStore, discard_upload
from shared.adapters import Adapters
from shared.errors import AdapterError, RopewayError, ServiceUnavailableError
from shared.lora.check import check_adapter
from shared.lora.files import content_identity
from shared.lora.source import parse_source
from shared.protocol import AdapterTargets
from shared.settings import TasksSettings
from shared.tasks import cancel_all
from tasks.fetch import fetch

_log = structlog.stdlib.get_logger("tasks.load")

#: Seconds without a sign of life after which nobody is at a load any more.
LEASE_S: Final = 15.0
_BEAT_S: Final = 3.0
#: Seconds between looks whether a content is still being deleted.
_DELETING_S: Final = 0.5


class TryAgainError(Exception):
    """The load may succeed later. RQ keeps the text of this, which holds nothing secret."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an adapter is loaded for. `dtype` is the model's."""

    targets: AdapterTargets
    dtype: str


async def load(
    name: str, version: int, *, adapters: Adapters, store: AdapterStore, settings: TasksSettings, last: bool
) -> None:
    """Carry out the load that a name's record tells of, and enter how it ended. One that was overtaken does nothing.

    Args:
        last: no other try follows: what may pass is entered as a failure too.

    Raises:
        TryAgainError: what was missing may come; nothing is entered.
    """
    pending = None
    try:
        record = await adapters.find(name)
        pending = None if record is None else record.pending
        if record is None or pending is None or pending.version != version:
            _log.info("load was overtaken", adapter=name, version=version)
            return
        async with asyncio.timeout(settings.adapter_load_timeout_s), _alive(adapters, name, version):
            content = await _content(name, record.pool, pending, adapters, store, settings)
            if await adapters.finish(name, version, content, await adapters.clock_ms()):
                _log.info("adapter loaded", adapter=name, version=version, identity=content.identity)
    except TimeoutError:
        _log.warning("load took too long", adapter=name, version=version)
        most = f"{settings.adapter_load_timeout_s} s (adapter_load_timeout_s)"
        await _failed(adapters, name, version, f"the load took longer than {most}")
    except ServiceUnavailableError as error:
        _log.warning("load failed for now", adapter=name, version=version, error=error.message, last=last)
        if not last:
            await _put_off(adapters, name, version, error.message)
            raise TryAgainError(error.message) from None
        await _failed(adapters, name, version, error.message)
    except RopewayError as error:
        _log.warning("load failed", adapter=name, version=version, error=error.message)
        await _failed(adapters, name, version, error.message)
    except Exception:  # noqa: BLE001 - the name must not stay as it is; the log has what a client must not see
        _log.exception("load failed", adapter=name, version=version)
        await _failed(adapters, name, version, "an internal error; the log of the tasks process has it")
    if pending is not None:
        await asyncio.to_thread(discard_upload, pending.source, lambda: store)


async def _content(
    name: str, pool: str, pending: PendingLoad, adapters: Adapters, store: AdapterStore, settings: TasksSettings
) -> Content:
    """What the source has, checked and in the store."""
    target = await _target(adapters, pool)
    source = parse_source(pending.source, uploads=True)
    if source.kind == "hub" and not settings.adapter_hub:
        raise AdapterError("lora_path: the setting adapter_hub does not allow to load from the hub")

    def prepare() -> Content:
        revision = fetch(source, store, settings.adapter_roots, work, settings.max_adapter_bytes)
        checked = check_adapter(
            work / "adapter",
            target.targets.modules,
            max_rank=target.targets.max_lora_rank,
            max_bytes=settings.max_adapter_bytes,
            dtype=target.dtype,
        )
        identity = content_identity(work / "adapter")
        return Content(identity=identity, rank=checked.rank, bytes=checked.bytes, revision=revision)

    with store.incoming() as work:
        content = await asyncio.to_thread(prepare)
        while not await adapters.keep(content.identity):  # noqa: ASYNC110 - another process deletes it
            await asyncio.sleep(_DELETING_S)
        await asyncio.to_thread(store.adopt, work / "adapter", content.identity)
    return content


async def _target(adapters: Adapters, pool: str) -> Target:
    card = await adapters.get_card(pool)
    targets = await adapters.get_targets(pool)
    if card is None or (card.max_lora_rank and targets is None):
        raise ServiceUnavailableError(f"base_model: no worker has said yet what {pool} is")
    if targets is None or not card.max_lora_rank:
        raise AdapterError(f"base_model: {pool} serves no adapters; its workers need ROPEWAY_ENABLE_LORA=true")
    return Target(targets, card.dtype)


@asynccontextmanager
async def _alive(adapters: Adapters, name: str, version: int) -> AsyncIterator[None]:
    """Say now and then that somebody is at the load."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            try:
                await adapters.loading(name, version, LEASE_S)
            except RopewayError as error:  # the next one may get through
                _log.warning("no sign of life", adapter=name, error=error.message)

    await adapters.loading(name, version, LEASE_S)
    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await cancel_all([task])


async def _failed(adapters: Adapters, name: str, version: int, why: str) -> None:
    try:
        await adapters.fail(name, version, why)
    except ServiceUnavailableError as error:
        raise TryAgainError(error.message) from None


async def _put_off(adapters: Adapters, name: str, version: int, why: str) -> None:
    """Say why the load takes longer. It may be Redis that is away, which then nobody can be told."""
    try:
        await adapters.put_off(name, version, why)
    except RopewayError as error:
        _log.warning("cannot note why a load is tried again", adapter=name, error=error.message)
