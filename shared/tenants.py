"""What is kept per tenant: rate limits, and which request an idempotency key stands for."""

from __future__ import annotations

import hashlib

import msgspec

from shared import keys, scripts
from shared.errors import ForeignDataError
from shared.jobs import RateLimits, Spent
from shared.jobstore import JobStore


class IdempotentRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A request under an idempotency key: a hash of what was asked, the jobs that it became, and when (Unix s)."""

    digest: str
    job_ids: list[str]
    created: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(IdempotentRequest)


class Tenants(JobStore):
    """A job store with the calls that concern one tenant."""

    async def spend(self, tenant: str, limits: RateLimits, requests: int, tokens: int) -> Spent:
        """Count requests and tokens against a tenant's limits: token buckets that hold a minute's worth."""
        taken, requests_left, tokens_left, wait = await self._run(scripts.spend(tenant, limits, requests, tokens))
        return Spent(
            allowed=bool(taken),
            requests_left=None if requests_left < 0 else requests_left,
            tokens_left=None if tokens_left < 0 else tokens_left,
            wait_s=None if wait < 0 else wait / 1e3,
        )

    async def claim(self, tenant: str, key: str, request: IdempotentRequest, ttl_s: float) -> IdempotentRequest:
        """Enter a request under a key, unless there is one.

        Returns:
            The one that holds: the caller's own, or an earlier one.

        Raises:
            ForeignDataError: what stands there is none.
        """
        name = keys.idempotency(tenant, hashlib.blake2b(key.encode(), digest_size=16).hexdigest())
        held = await self._run(scripts.claim(name, _ENCODER.encode(request), ttl_s))
        if held is None:
            return request
        try:
            return _DECODER.decode(held)
        except msgspec.DecodeError as error:
            raise ForeignDataError("an idempotency record does not read") from error
