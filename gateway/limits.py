"""What a tenant and a pool may have at once and per minute. The queue's own limits, per lane and exact, come after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.load import PoolLoad, PoolLoads
from gateway.policies import Policies
from gateway.tenant_queue import TenantQueues
from shared.errors import InvalidRequestError, OverloadedError, RopewayError
from shared.jobs import QueuedCount, QueuedLimits, RateLimits, Spent
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
        policies: limits of each tenant.
        pools: of each pool.
        queues: what each tenant has queued over all pools.
    """

    def __init__(
        self, tenants: Tenants, loads: PoolLoads, policies: Policies, pools: PoolLimits, queues: TenantQueues
    ) -> None:
        self._tenants, self._loads, self._policies, self._pools = tenants, loads, policies, pools
        self._queues = queues

    async def admit(self, tenant: str, envelopes: Sequence[Envelope], requests: int = 1) -> Mapping[str, str]:
        """Count jobs, of one request or of several that came together, against all limits.

        Returns:
            Headers for its answer, named as OpenAI's.

        Raises:
            OverloadedError: a limit is reached; nothing was counted.
            InvalidRequestError: it asks for more than a limit as a whole; no waiting helps.
            ServiceUnavailableError: Redis is away.
        """
        tokens = sum(envelope.cost_tokens for envelope in envelopes)
        pool = JobId.parse(envelopes[0].id).pool
        self._check_pools(envelopes)
        policy = await self._policies.of(tenant)
        if not policy.queued.any:
            return await self._spend(tenant, policy.rates, requests, tokens)
        jobs = {envelope.id: envelope.cost_tokens for envelope in envelopes}
        await self._enter(tenant, policy.queued, pool, jobs)
        try:
            return await self._spend(tenant, policy.rates, requests, tokens)
        except RopewayError:
            await self._queues.leave(tenant, jobs)
            raise

    async def _enter(self, tenant: str, most: QueuedLimits, pool: str, jobs: Mapping[str, int]) -> None:
        """Count a request's jobs among those that the tenant has queued."""
        tokens = sum(jobs.values())
        for name, wanted, limit in (("jobs", len(jobs), most.jobs), ("tokens", tokens, most.tokens)):
            if limit is not None and wanted > limit:
                raise InvalidRequestError(
                    f"the request needs {wanted} {name} in the queue, prompt and max_tokens of all choices; "
                    f"{limit} may be queued for your tenant",
                    code="tenant_queue_full",
                )
        count = await self._queues.enter(tenant, most, jobs)
        if not count.allowed:
            state = self._loads.of(pool)
            raise OverloadedError(
                f"too much counts as queued for your tenant, for a second after it has begun too: "
                f"{_limited(count, most)}",
                code="tenant_queue_full",
                retry_after=state.retry_after(),
            )

    async def _spend(self, tenant: str, rates: RateLimits, requests: int, tokens: int) -> Mapping[str, str]:
        if not rates.any:
            return {}
        spent = await self._tenants.spend(tenant, rates, requests, tokens)
        if spent.allowed:
            return _headers(rates, spent)
        if spent.wait_s is None:
            if rates.requests is not None and requests > rates.requests:
                raise InvalidRequestError(
                    f"these are {requests} requests; the limit is {rates.requests} per minute",
                    code="rate_limit_exceeded",
                )
            raise InvalidRequestError(
                f"the request needs {tokens} tokens, prompt and max_tokens of every choice; the limit is "
                f"{rates.tokens} per minute",
                code="rate_limit_exceeded",
            )
        error = OverloadedError(
            f"rate limit reached: {_what(rates)} per minute; try again in {spent.wait_s:.1f} s",
            code="rate_limit_exceeded",
            retry_after=spent.wait_s,
        )
        error.headers = _headers(rates, spent)
        raise error

    def _check_pools(self, envelopes: Sequence[Envelope]) -> None:
        if self._pools.queued_jobs is None and self._pools.queued_tokens is None:
            return
        costs: dict[str, list[int]] = {}
        for envelope in envelopes:
            costs.setdefault(JobId.parse(envelope.id).pool, []).append(envelope.cost_tokens)
        for pool, tokens in costs.items():
            self._check_pool(pool, len(tokens), sum(tokens))

    def _check_pool(self, pool: str, jobs: int, tokens: int) -> None:
        most = self._pools
        state = self._loads.of(pool)
        queued = state.load
        if most.queued_jobs is not None and queued.queued_jobs + jobs > most.queued_jobs:
            raise _full(state, f"{queued.queued_jobs} jobs are queued, {most.queued_jobs} may be")
        if most.queued_tokens is not None and queued.queued_tokens + tokens > most.queued_tokens:
            raise _full(state, f"{queued.queued_tokens} tokens are queued, {most.queued_tokens} may be")


def _full(state: PoolLoad, what: str) -> OverloadedError:
    return OverloadedError(f"the queue of this model is full: {what}", retry_after=state.retry_after())


def _limited(count: QueuedCount, most: QueuedLimits) -> str:
    pairs = ((count.jobs, most.jobs, "jobs"), (count.tokens, most.tokens, "tokens"))
    return ", ".join(f"{queued} {name} of {limit}" for queued, limit, name in pairs if limit is not None)


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
