"""What a tenant and a pool may have at once and per minute. The queue's own limits, per lane and exact, come after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.load import PoolLoad, PoolLoads
from shared.errors import InvalidRequestError, OverloadedError
from shared.jobs import RateLimits, Spent
from shared.keys import JobId
from shared.protocol import Envelope
from shared.tenants import Tenants

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Of each pool, over all lanes; None is no limit. Soft: sums are up to a second old."""

    queued_jobs: int | None = None
    queued_tokens: int | None = None


class Limiter:
    """Says of a prepared request whether it may be queued.

    Args:
        tenants: where rate limits are counted, for all gateways together.
        loads: of pools.
        rates: of each tenant.
        pools: of each pool.
    """

    def __init__(self, tenants: Tenants, loads: PoolLoads, rates: RateLimits, pools: PoolLimits) -> None:
        self._tenants, self._loads, self._rates, self._pools = tenants, loads, rates, pools

    async def admit(self, tenant: str, envelopes: Sequence[Envelope]) -> Mapping[str, str]:
        """Count a request with its jobs against all limits.

        Returns:
            Headers for its answer, named as OpenAI's.

        Raises:
            OverloadedError: a limit is reached; nothing was counted.
            InvalidRequestError: it asks for more tokens than a minute has; no waiting helps.
            ServiceUnavailableError: Redis is away.
        """
        tokens = sum(envelope.cost_tokens for envelope in envelopes)
        self._check_pool(JobId.parse(envelopes[0].id).pool, len(envelopes), tokens)
        if not self._rates.any:
            return {}
        spent = await self._tenants.spend(tenant, self._rates, 1, tokens)
        if spent.allowed:
            return _headers(self._rates, spent)
        if spent.wait_s is None:
            raise InvalidRequestError(
                f"the request needs {tokens} tokens, prompt and max_tokens of every choice; the limit is "
                f"{self._rates.tokens} per minute",
                code="rate_limit_exceeded",
            )
        raise OverloadedError(
            f"rate limit reached: {_what(self._rates)} per minute; try again in {spent.wait_s:.1f} s",
            code="rate_limit_exceeded",
            retry_after=spent.wait_s,
        )

    def _check_pool(self, pool: str, jobs: int, tokens: int) -> None:
        most = self._pools
        if most.queued_jobs is None and most.queued_tokens is None:
            return
        state = self._loads.of(pool)
        queued = state.load
        if most.queued_jobs is not None and queued.queued_jobs + jobs > most.queued_jobs:
            raise _full(state, f"{queued.queued_jobs} jobs are queued, {most.queued_jobs} may be")
        if most.queued_tokens is not None and queued.queued_tokens + tokens > most.queued_tokens:
            raise _full(state, f"{queued.queued_tokens} tokens are queued, {most.queued_tokens} may be")


def _full(state: PoolLoad, what: str) -> OverloadedError:
    return OverloadedError(f"the queue of this model is full: {what}", retry_after=state.retry_after())


def _what(rates: RateLimits) -> str:
    parts = [f"{n} {name}" for n, name in ((rates.requests, "requests"), (rates.tokens, "tokens")) if n is not None]
    return " and ".join(parts)


def _headers(rates: RateLimits, spent: Spent) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, limit, left in (
        ("requests", rates.requests, spent.requests_left),
        ("tokens", rates.tokens, spent.tokens_left),
    ):
        if limit is not None and left is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(left)
            headers[f"x-ratelimit-reset-{name}"] = f"{(limit - left) / limit * _MINUTE_S:.1f}s"
    return headers
