"""One line of a batch as a request: checked, queued and answered by the gateway's own code, without HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import structlog

from gateway.access import Gate
from gateway.admission import Caller, JobOptions
from gateway.catalogue import Catalogue
from gateway.errors import JobLostError, internal, public
from gateway.errors import body as error_body
from gateway.hub import Hub
from gateway.metrics import GatewayMetrics
from gateway.preparation import Prepared, Preparer
from gateway.served import Directory
from gateway.spans import submitting
from shared import keys
from shared.access import Access
from shared.adapters import Adapters
from shared.batch_record import BatchRecord
from shared.connect import connect, connect_pubsub
from shared.errors import (
    JobExpiredError,
    JobNotFoundError,
    OverloadedError,
    RopewayError,
    ServiceUnavailableError,
)
from shared.jobs import LaneLimits, Lifetime
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import ErrorInfo
from shared.settings import GatewaySettings
from shared.tasks import cancel_all
from shared.trace_context import is_sampled
from shared.tracing import OFF, Attribute, Tracing, open_tracing
from tasks import batch_requests
from tasks.batch_requests import WholeAnswer

log = structlog.stdlib.get_logger("tasks.batch_engine")

#: Seconds that a line's result is kept at least: it is read, written and then deleted within minutes, or, where all
#: tasks processes were away meanwhile, when they are back.
RESULT_S: Final = 24 * 3600.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0
_IDLE_S: Final = 5.0
#: Tries of a line whose job Redis has lost.
_MOST_LOST: Final = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a line: `status` and `body` of its answer; `job_ids` may be deleted once that is written."""

    status: int
    body: bytes
    job_ids: Sequence[str] = ()

    @property
    def done(self) -> bool:
        """Whether it is a completed one."""
        return self.status == 200


class LineRunner:
    """Runs lines of one batch.

    Args:
        stopping: whether nothing more is to be begun.
    """

    def __init__(
        self,
        batch: BatchRecord,
        store: JobStore,
        catalogue: Catalogue,
        preparer: Preparer,
        hub: Hub,
        settings: GatewaySettings,
        stopping: Callable[[], bool],
        tracing: Tracing = OFF,
    ) -> None:
        self._batch, self._store, self._catalogue = batch, store, catalogue
        self._preparer, self._hub, self._settings, self._stopping = preparer, hub, settings, stopping
        self._caller = Caller(tenant=batch.tenant, authenticated=batch.authenticated, key=batch.key)
        self._live: set[str] = set()
        # Where it is not recorded who made the batch, its lines are not either.
        self._tracing = OFF if batch.trace and not is_sampled(batch.trace) else tracing

    async def run(self, number: int, body: bytes, remaining_s: float) -> Outcome | None:
        """Run one line, or find what an earlier run of it made; None where it was stopped before it had ended.

        A refusal that passes is waited out. Raises ServiceUnavailableError never, asyncio.CancelledError at once.
        """
        # A trace of its own: that of the batch would be one of fifty thousand lines.
        attributes: dict[str, Attribute] = {"ropeway.batch.id": self._batch.id, "ropeway.batch.line": number}
        with self._tracing.span("batch line", attributes=attributes, links=[self._batch.trace]) as span:
            outcome = await self._run(number, body, remaining_s, replace(self._caller, trace=dict(span.trace)))
            if outcome is not None:
                span.set({"http.response.status_code": outcome.status})
            return outcome

    async def _run(self, number: int, body: bytes, remaining_s: float, caller: Caller) -> Outcome | None:
        pause, lost = _FIRST_PAUSE_S, 0
        while True:
            try:
                return await self._once(number, body, remaining_s, caller)
            except JobExpiredError:
                return None
            except JobLostError as error:
                lost += 1
                if lost >= _MOST_LOST:
                    return _refused(public(error, self._batch.id))
            except (OverloadedError, ServiceUnavailableError) as error:
                log.info("line waits", batch=self._batch.id, line=number, why=error.message)
                if self._stopping():
                    return None
            except RopewayError as error:
                return _refused(public(error, self._batch.id))
            except Exception:  # one line must not end the others
                log.exception("line failed", batch=self._batch.id, line=number)
                return _refused(internal(self._batch.id))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def cancel_all(self) -> None:
        """Ask for the end of all jobs that are under way."""
        for job_id in list(self._live):
            await self._store.cancel(job_id)

    async def forget(self, job_ids: Sequence[str]) -> None:
        """Delete jobs whose results are written; those that cannot be now expire by themselves."""
        for job_id in job_ids:
            try:
                await self._store.delete(job_id)
            except RopewayError as error:
                log.debug("job not deleted", job_id=job_id, why=error.message)

    async def _once(self, number: int, body: bytes, remaining_s: float, caller: Caller) -> Outcome | None:
        line = await batch_requests.read(self._batch.endpoint, body, self._store, caller)
        options = JobOptions("batch", self._settings.flush_ms, line.request.metadata or {})
        with line.naming():
            prepared = self._named(number, await self._preparer.prepare(line.request, caller, options))
        ids = prepared.shape.job_ids
        if self._stopping() and not await self._known(ids):
            return None
        self._live.update(ids)
        try:
            answer = await self._answer(prepared, line.answer(prepared), remaining_s)
        finally:
            self._live.difference_update(ids)
        return None if answer is None else Outcome(200, answer, ids)

    async def _answer(self, prepared: Prepared, answer: WholeAnswer, remaining_s: float) -> bytes | None:
        """The answer's body; None where a job of it was cancelled."""
        lifetime = Lifetime(max(1.0, remaining_s), self._settings.max_run_s, max(RESULT_S, self._settings.retention_s))
        async with await self._hub.follow(prepared.shape.job_ids) as follower:
            with submitting(self._tracing, prepared.envelopes):
                for envelope, track in zip(prepared.envelopes, follower.tracks, strict=True):
                    submitted = None
                    if not self._stopping():
                        submitted = await self._store.submit(envelope, lifetime=lifetime)
                    if submitted is None or submitted.duplicate:
                        track.look()
            if self._stopping():
                for job_id in prepared.shape.job_ids:
                    await self._store.cancel(job_id)
            while not follower.ended:
                for index, frame in await follower.next():
                    answer.add(index, frame, chunks=False)
            if any(track.status == "cancelled" for track in follower.tracks):
                return None
        return await asyncio.to_thread(answer.whole)

    async def _known(self, job_ids: Sequence[str]) -> bool:
        for job_id in job_ids:
            try:
                await self._store.status(job_id)
            except JobNotFoundError:
                return False
        return True

    def _named(self, number: int, prepared: Prepared) -> Prepared:
        """The request's jobs under ids that every run of this line gives them: queued twice, they are one."""
        ids = []
        for index, envelope in enumerate(prepared.envelopes):
            name = hashlib.blake2b(f"{self._batch.id}/{number}/{index}".encode(), digest_size=10)
            drawn = JobId.parse(envelope.id)
            lane = drawn.lane
            if envelope.adapter is None and len(envelope.prompt_token_ids) < keys.AFFINITY_TOKENS:
                pool = self._catalogue.known(drawn.pool)
                lane = int.from_bytes(name.digest()[:4], "big") % (1 if pool is None else pool.card.lanes)
            envelope.id = str(JobId(drawn.pool, lane, f"{self._batch.created_ms:012x}{name.hexdigest()}"))
            ids.append(envelope.id)
        return Prepared(prepared.envelopes, replace(prepared.shape, job_ids=ids))


@asynccontextmanager
async def line_runner(
    batch: BatchRecord, redis_url: str, stopping: Callable[[], bool], window: int
) -> AsyncIterator[LineRunner]:
    """Open what lines need. Raises ServiceUnavailableError where Redis is away."""
    settings = GatewaySettings(redis_url=redis_url)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    async with AsyncExitStack() as stack:
        tracing = open_tracing(settings, "ropeway-tasks", secrets.token_hex(16))
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        client = connect(redis_url)
        stack.push_async_callback(client.aclose)
        listener = connect_pubsub(redis_url)
        stack.push_async_callback(listener.aclose)
        executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        limits = LaneLimits(settings.max_queued_jobs, settings.max_queued_tokens)
        store = JobStore(client, limits=limits, usage_days=settings.usage_days)
        hub = await stack.enter_async_context(
            Hub(
                listener, store, GatewayMetrics(), max_streams=4 * window, queue_frames=settings.stream_queue_frames,
                idle_s=_IDLE_S,
            )
        )  # fmt: skip
        catalogue = Catalogue(store, executor, settings.pools)
        refresh = asyncio.create_task(catalogue.run(), name="catalogue")
        stack.push_async_callback(cancel_all, [refresh])
        policies = Gate(Access(client), settings).policies
        preparer = Preparer(Directory(catalogue, Adapters(client)), executor, settings, policies, tracing)
        yield LineRunner(batch, store, catalogue, preparer, hub, settings, stopping, tracing)


def _refused(info: ErrorInfo) -> Outcome:
    return Outcome(info.status, error_body(info))
