"""Between preparing a request and queueing it: repeats are recognised, limits are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.idempotency import REPLAYED, Idempotency
from gateway.limits import Limiter
from gateway.preparation import Prepared
from shared.errors import JobNotFoundError
from shared.jobstore import JobStore


@dataclass(frozen=True, slots=True)
class Repeat:
    """An idempotency key, a hash of what is asked under it, and how long its jobs may be there (None: the longest that
    the settings allow)."""

    key: str
    digest: str
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Entered:
    """A request that may be queued, and headers for its answer; `replayed`: its jobs are there since an earlier one."""

    prepared: Prepared
    headers: Mapping[str, str] = field(default_factory=dict)
    replayed: bool = False


class Entrance:
    """What every request passes before its jobs are submitted."""

    def __init__(self, store: JobStore, idempotency: Idempotency, limiter: Limiter) -> None:
        self._store, self._idempotency, self._limiter = store, idempotency, limiter

    async def enter(self, tenant: str, prepared: Prepared, repeat: Repeat | None, requests: int = 1) -> Entered:
        """The request as it is to be submitted.

        A repeat of one whose jobs are there is not counted against any limit.

        Raises:
            KeyReusedError: the idempotency key stands for another request.
            OverloadedError, InvalidRequestError: see `Limiter.admit`.
            ServiceUnavailableError: Redis is away.
        """
        if repeat is not None:
            prepared, known = await self._idempotency.attach(tenant, repeat.key, repeat.digest, prepared, repeat.ttl_s)
            if known and await self._is_there(prepared.shape.job_ids[0]):
                return Entered(prepared, {REPLAYED: "true"}, replayed=True)
        return Entered(prepared, await self._limiter.admit(tenant, prepared.envelopes, requests))

    async def _is_there(self, job_id: str) -> bool:
        try:
            await self._store.status(job_id)
        except JobNotFoundError:
            return False
        return True
