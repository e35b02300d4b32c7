"""The pools that this gateway can serve: cards, tokenizers and live workers, read from the job store."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog

from gateway.prompts import PromptEncoder
from shared.errors import ModelNotFoundError, ProtocolError, RopewayError, ServiceUnavailableError, VersionError
from shared.jobstore import JobStore
from shared.protocol import Card, TokenizerBundle, WorkerInfo

log = structlog.get_logger(__name__)

REFRESH_S = 5.0
#: An unknown name makes the catalogue look again, at most this often.
MISS_REFRESH_S = 0.5
#: Retry-After in seconds where a pool's first worker has not come yet; it reads a model.
FIRST_WORKER_S = 10.0
#: A worker not heard of for so long counts as gone.
WORKER_TTL_MS = 15_000


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool as the gateway sees it."""

    card: Card
    encoder: PromptEncoder
    workers: tuple[WorkerInfo, ...] = ()

    @property
    def kv_tokens(self) -> int:
        """Tokens in the largest KV cache of a live worker; while none lives, in that of the card's writer."""
        return max((w.kv_tokens for w in self.workers), default=0) or self.card.kv_tokens

    @property
    def max_sequence(self) -> int:
        """The longest that one sequence can get, prompt and output."""
        return min(self.card.max_model_len, self.kv_tokens) if self.kv_tokens else self.card.max_model_len


class Catalogue:
    """Pools by name, refreshed every few seconds and when a name is not found.

    Reads only; one lock makes refreshes follow each other.
    """

    def __init__(self, store: JobStore, executor: Executor, expected: Sequence[str] = ()) -> None:
        self._store = store
        self._expected = frozenset(expected)
        self._executor = executor
        self._pools: dict[str, Pool] = {}
        self._lock = asyncio.Lock()
        self._refreshed = -math.inf
        self._broken: dict[str, tuple[str, int]] = {}
        self._foreign: dict[str, str] = {}
        self._listed: frozenset[str] = frozenset()

    @property
    def pools(self) -> Sequence[Pool]:
        """All pools known now, by name."""
        return [self._pools[name] for name in sorted(self._pools)]

    def known(self, model: str) -> Pool | None:
        """The pool that serves a model, if it is known now."""
        return self._pools.get(model)

    async def find(self, model: str) -> Pool:
        """The pool that serves a model.

        Raises:
            ModelNotFoundError: no pool has this name.
            ServiceUnavailableError: Redis is away, so it cannot be known; or the pool is meant to be here, and no
                worker has said yet what it serves; or it is of another wire version.
        """
        pool = self._pools.get(model)
        if pool is None:
            await self._look_again(model)
            pool = self._pools.get(model)
        if pool is None and model in self._foreign:
            raise ServiceUnavailableError(
                f"this gateway cannot serve the model: {self._foreign[model]}", retry_after=FIRST_WORKER_S
            )
        if pool is None and model in self._expected:
            raise ServiceUnavailableError("the first worker of this model is being started", retry_after=FIRST_WORKER_S)
        if pool is None:
            raise ModelNotFoundError("model: no model with this name is served here, see /v1/models", param="model")
        return pool

    async def refresh_if_empty(self) -> None:
        """Look again where nothing is known.

        Raises:
            ServiceUnavailableError: Redis is away.
        """
        if not self._pools:
            await self.refresh_after_miss()

    async def refresh(self) -> None:
        """Read everything again; a pool whose card did not change keeps its tokenizer.

        Raises:
            ServiceUnavailableError: Redis is away; what was known stays.
        """
        async with self._lock:
            pools: dict[str, Pool] = {}
            foreign: dict[str, str] = {}
            listed = frozenset(await self._store.pools())
            for name in sorted(listed):
                try:
                    pool = await self._read(name)
                except ProtocolError as error:  # one pool of another wire version must not hide the others
                    if self._foreign.get(name) != error.message:
                        log.error("catalogue.pool_unreadable", pool=name, error=error.message)
                    if isinstance(error, VersionError):
                        foreign[name] = error.message
                    continue
                if pool is not None:
                    pools[name] = pool
            self._pools, self._foreign, self._listed = pools, foreign, listed
            self._refreshed = time.monotonic()

    async def run(self) -> None:
        """Refresh for ever."""
        while True:
            try:
                await self.refresh()
            except RopewayError as error:
                log.warning("catalogue.refresh_failed", error=error.message)
            except Exception:  # without this task models would never be seen to come and go
                log.exception("catalogue.refresh_failed")
            await asyncio.sleep(REFRESH_S)

    def refreshed_within(self, seconds: float) -> bool:
        """Whether everything was read so lately."""
        return time.monotonic() - self._refreshed <= seconds

    async def refresh_after_miss(self) -> bool:
        """Look again, unless that was done just now; answers whether it was.

        Raises:
            ServiceUnavailableError: Redis is away.
        """
        if time.monotonic() - self._refreshed < MISS_REFRESH_S:
            return False
        await self.refresh()
        return True

    async def _look_again(self, model: str) -> None:
        """After a miss; and where that was done just now, if the name has come since."""
        if not await self.refresh_after_miss() and model not in self._listed and model in await self._store.pools():
            await self.refresh()

    async def _read(self, name: str) -> Pool | None:
        card = await self._store.get_card(name)
        if card is None:
            return None
        workers = tuple(await self._store.live_workers(name, WORKER_TTL_MS))
        known = self._pools.get(name)
        if known is not None and known.card == card:
            return Pool(card, known.encoder, workers)
        encoder = await self._encoder(card)
        return None if encoder is None else Pool(card, encoder, workers)

    async def _encoder(self, card: Card) -> PromptEncoder | None:
        """The pool's tokenizer; None where its bundle is missing or cannot be read, logged once per card."""
        version = (card.digest, card.created_ms)
        if self._broken.get(card.pool) == version:
            return None
        try:
            bundle = await self._store.get_bundle(card.pool)
            if bundle is None:
                log.warning("catalogue.no_tokenizer", pool=card.pool)
                return None
            return await self._build(card, bundle)
        except (ValueError, ProtocolError) as error:
            log.error("catalogue.pool_unusable", pool=card.pool, error=str(error))
            self._broken[card.pool] = version
            return None

    async def _build(self, card: Card, bundle: TokenizerBundle) -> PromptEncoder:
        loop = asyncio.get_running_loop()
        encoder = await loop.run_in_executor(self._executor, PromptEncoder, card, bundle)
        log.info("catalogue.pool", pool=card.pool, context=card.max_model_len, lanes=card.lanes)
        return encoder
