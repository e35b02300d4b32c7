"""What is kept per tenant: rate limits, queued jobs, and which request an idempotency key stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from shared import keys, scripts
from shared.calls import run
from shared.errors import ForeignDataError, ServiceUnavailableError
from shared.jobs import QueuedCount, QueuedLimits, RateLimits, Spent
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.redis_errors import typed
from shared.scripts import Call

#: Jobs whose status is asked for at once.
_PAGE: Final = 500
#: Milliseconds from when a job is counted until it is submitted, at the most; later one that is not there never comes.
_SUBMIT_MS: Final = 10_000


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

    async def enter(self, tenant: str, limits: QueuedLimits, jobs: Mapping[str, int], ttl_s: float) -> QueuedCount:
        """Count jobs, given with their costs in tokens, as queued ones of a tenant: all of them, or none.

        What was counted stays so until `leave` or `settle`, so a count is never too low for what passed through here.

        Args:
            ttl_s: seconds without an `enter` after which the tenant's jobs are forgotten.
        """
        allowed, jobs_queued, tokens = await self._run(scripts.enter(tenant, limits, jobs, ttl_s))
        return QueuedCount(bool(allowed), jobs_queued, tokens)

    async def leave(self, tenant: str, job_ids: Sequence[str | bytes]) -> None:
        """Count jobs as queued no longer."""
        await self._run(scripts.leave(tenant, job_ids))

    async def settle(self, tenant: str) -> int:
        """Ask for the status of every job that counts as queued, and count those that are not no longer.

        Jobs whose node is away go on counting, and so do those that may still be on their way to their lane.

        Returns:
            How many were left out.
        """
        key = keys.queued(tenant)
        held = await self._ask("HGETALL", key)
        seconds, _ = await self._run(Call(("TIME",), key))
        entries = [entry for entry in held.items() if entry[0] != b"tokens"]
        gone: list[bytes] = []
        for start in range(0, len(entries), _PAGE):
            gone += await self._gone(entries[start : start + _PAGE], int(seconds) * 1000 - _SUBMIT_MS)
        for start in range(0, len(gone), _PAGE):
            await self.leave(tenant, gone[start : start + _PAGE])
        return len(gone)

    async def _gone(self, entries: Sequence[tuple[bytes, bytes]], entered_until: int) -> list[bytes]:
        """Of some entries, the names of those whose jobs are not queued."""
        ids = [JobId.match(name.decode(errors="replace")) for name, _ in entries]
        names = [keys.job(job_id) for job_id in ids if job_id is not None]
        answers = iter(await run(self._redis, [Call(("HGET", name, "status"), name) for name in names]))
        return [
            name
            for job_id, (name, value) in zip(ids, entries, strict=True)
            if job_id is None or not _may_be_queued(next(answers), value, entered_until)
        ]


def _may_be_queued(status: Any, value: bytes, entered_until: int) -> bool:
    """Whether a job counts on, by the answer to the question for its status."""
    if isinstance(status, Exception):
        return isinstance(typed(status), ServiceUnavailableError)
    if status is None:
        entered = value.rpartition(b" ")[2]
        return entered.isdigit() and int(entered[-20:]) > entered_until
    return status in (b"queued", b"delayed")
