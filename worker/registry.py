"""The pool's card and this worker's entry in the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from engine.request import ModelInfo
from shared.errors import ConflictError, ProtocolError
from shared.jobstore import JobStore
from shared.protocol import AdapterTargets, Card, TokenizerBundle, WorkerInfo
from worker.clock import RedisClock
from worker.loop import EngineLoop
from worker.metrics import WorkerMetrics
from worker.publisher import REDIS_TROUBLE

_log = structlog.stdlib.get_logger("worker.registry")

#: Heartbeats that may be missed before a worker counts as gone.
MISSED_BEATS = 4


def _version() -> str:
    try:
        return version("ropeway")
    except PackageNotFoundError:  # run from a checkout
        return ""


class Registry:
    """Joins the pool, beats, leaves.

    Args:
        on_owners: called with the live workers' owners after each heartbeat.
        on_pause: called with whether the pool is paused, likewise: a message may have been lost.
        on_conflict: called when the pool's card is no longer one that this worker can serve.
    """

    def __init__(
        self,
        store: JobStore,
        info: ModelInfo,
        loop: EngineLoop,
        metrics: WorkerMetrics,
        clock: RedisClock,
        *,
        pool: str,
        lanes: int,
        owner: str,
        max_num_seqs: int,
        heartbeat_s: float,
        on_owners: Callable[[list[str]], None],
        on_pause: Callable[[bool], None],
        on_conflict: Callable[[ConflictError], None],
    ) -> None:
        self._store, self._loop, self._metrics, self._clock = store, loop, metrics, clock
        self._pool, self._owner, self._heartbeat_s = pool, owner, heartbeat_s
        self._on_owners, self._on_pause, self._on_conflict = on_owners, on_pause, on_conflict
        self._card = Card(
            pool=pool,
            digest=info.digest,
            lanes=lanes,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            kv_tokens=info.kv_tokens,
            dtype=info.dtype,
            created_ms=time.time_ns() // 1_000_000,
            sampling_defaults=info.sampling_defaults,
            max_lora_rank=info.max_lora_rank,
        )
        self._targets = AdapterTargets(modules=info.adapter_modules, max_lora_rank=info.max_lora_rank)
        self._bundle = TokenizerBundle(
            tokenizer_json=info.tokenizer_json,
            chat_template=info.chat_template,
            special_tokens=info.special_tokens,
        )
        self._entry = WorkerInfo(
            owner=owner,
            state="ready",
            version=_version(),
            started_ms=time.time_ns() // 1_000_000,
            kv_tokens=info.kv_tokens,
            max_num_seqs=max_num_seqs,
        )
        self.seen_redis = 0.0

    @property
    def _ttl_ms(self) -> int:
        return int(MISSED_BEATS * self._heartbeat_s * 1e3)

    def state(self, state: Literal["starting", "ready", "draining"]) -> None:
        """What the next heartbeats say."""
        self._entry.state = state

    async def join(self) -> None:
        """Write or accept the pool's card and be listed; waits for Redis as long as it takes.

        Raises:
            ConflictError: the pool serves another model, or has another number of lanes or wire version.
        """
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(REDIS_TROUBLE),
            wait=wait_random_exponential(multiplier=0.1, max=5.0),
            before_sleep=lambda state: self._failed(state.outcome.exception() if state.outcome else None),
        ):
            with attempt:
                await self._put_card()
                await self._beat()

    async def run(self) -> None:
        """Beat until cancelled. Redis being away is no error: the next beat tries again."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self._check_card()
                await self._beat()
            except ConflictError as error:
                self._on_conflict(error)
                return
            except (*REDIS_TROUBLE, ProtocolError) as error:
                self._failed(error)

    async def leave(self) -> None:
        """Be listed no more."""
        await self._store.leave(self._pool, self._owner)

    async def _check_card(self) -> None:
        """Redis may have come back empty, or another model may have taken the empty pool over."""
        card: Card | None
        try:
            card = await self._store.get_card(self._pool)
        except ProtocolError as error:
            _log.error("the pool's card does not read", pool=self._pool, error=error.message)
            card = None
        if card is None or card.digest != self._card.digest:
            await self._put_card()
            _log.warning("card written again", pool=self._pool)

    async def _put_card(self) -> None:
        await self._store.put_card(self._card, self._bundle)
        if self._targets.max_lora_rank:
            await self._store.put_targets(self._pool, self._targets)

    async def _beat(self) -> None:
        stats = self._loop.stats
        entry = self._entry
        entry.running, entry.waiting = stats.running, stats.waiting
        entry.free_blocks, entry.total_blocks = stats.free_blocks, stats.total_blocks
        adapters = stats.adapters
        entry.adapters, entry.adapters_in_memory = adapters.resident, adapters.in_memory
        entry.adapters_loading, entry.adapters_failed = adapters.loading, adapters.failed
        entry.adapters_failed_ms = {each: int(self._clock.at_ms(at)) for each, at in adapters.failed_at.items()}
        entry.max_loras = adapters.slots
        owners = await self._store.heartbeat(self._pool, entry, self._ttl_ms)
        self._clock.set(await self._store.now_ms(self._pool))
        self.seen_redis = time.monotonic()
        self._on_owners(owners)
        self._on_pause(await self._store.paused(self._pool))

    def _failed(self, error: BaseException | None) -> None:
        self._metrics.redis_errors.inc()
        _log.warning("heartbeat failed, trying again", error=repr(error))
