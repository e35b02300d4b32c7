"""Submitting jobs, and ending those whose client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from gateway.load import PoolLoads
from gateway.metrics import GatewayMetrics
from gateway.spans import submitting
from shared.errors import OverloadedError, RopewayError, ServiceUnavailableError
from shared.jobs import Lifetime
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import Envelope
from shared.tracing import OFF, Tracing

log = structlog.get_logger(__name__)

#: Jobs of one request that are submitted at the same time.
_PARALLEL = 16
_CANCEL_ATTEMPTS = 6
#: Seconds that closing waits for cancels under way.
CLOSE_S = 3.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one job: its lifetime, None for the gateway's, and what is kept with it."""

    lifetime: Lifetime | None = None
    attachment: bytes = b""


class Submitter:
    """Puts jobs into the queue and takes them back. Commands are never broken off in the middle."""

    def __init__(self, store: JobStore, metrics: GatewayMetrics, loads: PoolLoads, tracing: Tracing = OFF) -> None:
        self._store, self._metrics, self._loads, self._tracing = store, metrics, loads, tracing
        self._cancels: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def submit(
        self, envelopes: Sequence[Envelope], terms: Terms | Sequence[Terms] | None = None, *, keep: bool = False
    ) -> None:
        """Queue all jobs of a request, or none.

        Args:
            terms: of each job, or of all.
            keep: where that fails, those that are queued go on: the request has a key, and will be repeated under it.

        Raises:
            OverloadedError: a limit of a lane is reached.
            ServiceUnavailableError: Redis is away, full, loading or read-only, or too few replicas have a job.
        """
        with submitting(self._tracing, envelopes):
            await self._submit_all(envelopes, terms, keep)

    async def _submit_all(
        self, envelopes: Sequence[Envelope], terms: Terms | Sequence[Terms] | None, keep: bool
    ) -> None:
        answers: list[BaseException | None]
        each = terms if isinstance(terms, Sequence) else [terms or Terms()] * len(envelopes)
        if len(envelopes) == 1:
            answers = [await self._submit(envelopes[0], each[0])]
        else:
            gate = asyncio.Semaphore(_PARALLEL)
            pairs = zip(envelopes, each, strict=True)
            answers = await asyncio.gather(*(self._submit(envelope, one, gate) for envelope, one in pairs))
        errors = [answer for answer in answers if answer is not None]
        self._count(envelopes, answers)
        if not errors:
            return
        # An answer that was lost on its way says nothing of whether the job was queued: end those too.
        unsure = [e.id for e, a in zip(envelopes, answers, strict=True) if not isinstance(a, OverloadedError)]
        self.cancel_later([] if keep else unsure, 0.0)
        if isinstance(errors[0], OverloadedError):
            errors[0].retry_after = self._loads.of(JobId.parse(envelopes[0].id).pool).retry_after()
        raise errors[0]

    async def _submit(
        self, envelope: Envelope, terms: Terms, gate: asyncio.Semaphore | None = None
    ) -> BaseException | None:
        """Queue one job; answers what went wrong, so that the others are not broken off."""
        try:
            async with gate or nullcontext():
                await self._store.submit(envelope, lifetime=terms.lifetime, attachment=terms.attachment)
        except Exception as error:  # noqa: BLE001  (the caller raises it)
            return error
        return None

    def cancel_later(self, job_ids: Sequence[str], grace_s: float, *, leave_readers: bool = False) -> None:
        """End jobs after a grace, in the background; `leave_readers` spares those that somebody follows by then."""
        if not job_ids:
            return
        task = asyncio.create_task(self._cancel(list(job_ids), grace_s, leave_readers))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def idle(self) -> None:
        """Wait until no cancel is under way or in its grace."""
        while self._cancels:
            await asyncio.wait(self._cancels)

    async def close(self) -> None:
        """End what is in its grace now; wait for it, not for ever."""
        self._closing.set()
        if self._cancels:
            _, late = await asyncio.wait(self._cancels, timeout=CLOSE_S)
            for task in late:
                task.cancel()

    async def _cancel(self, job_ids: list[str], grace_s: float, leave_readers: bool) -> None:
        if grace_s > 0:
            with suppress(TimeoutError):  # the usual way: the grace is over
                await asyncio.wait_for(self._closing.wait(), grace_s)
        for job_id in job_ids:
            try:
                if grace_s > 0 and leave_readers and await self._followed(job_id):
                    continue
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception_type(ServiceUnavailableError),
                    wait=wait_random_exponential(multiplier=0.1, max=2.0),
                    stop=stop_after_attempt(_CANCEL_ATTEMPTS),
                    reraise=True,
                ):
                    with attempt:
                        status = await self._store.cancel(job_id)
                self._metrics.cancels.inc()
                log.info("job.cancelled", job_id=job_id, status=status)
            except RopewayError as error:
                log.warning("job.cancel_failed", job_id=job_id, error=error.message)

    async def _followed(self, job_id: str) -> bool:
        """Whether any gateway follows the job now: its client may be back under another connection."""
        readers = await self._store.readers(job_id)
        if readers is None:
            log.warning("job.readers_unknown", job_id=job_id)
        return bool(readers)

    def _count(self, envelopes: Sequence[Envelope], answers: Sequence[BaseException | None]) -> None:
        for envelope, answer in zip(envelopes, answers, strict=True):
            outcome = "accepted" if answer is None else "overloaded" if isinstance(answer, OverloadedError) else "error"
            self._metrics.jobs.labels(envelope.model, outcome).inc()
