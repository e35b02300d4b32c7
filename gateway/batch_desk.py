"""Files and batches: what routes ask of them. The lines themselves are run by tasks processes."""

from __future__ import annotations

import asyncio

import structlog
from msgspec.structs import replace

from gateway.admission import Caller
from gateway.file_form import FileForm
from gateway.schemas import CreateBatchRequest, check_metadata, refuse
from shared.batch_record import ENDPOINTS, WINDOW_S, BatchRecord, FileRecord, Progress
from shared.batches import Batches, new_batch_id
from shared.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RopewayError,
    ServiceUnavailableError,
    UnsupportedParameterError,
)
from shared.file_store import FileStore
from shared.settings import GatewaySettings
from shared.task_queue import TaskQueue, tasks_url

log = structlog.get_logger(__name__)

#: Seconds that one task may take; it ends by itself long before.
_TASK_TIMEOUT_S = 1800
#: Seconds that an input is kept past the end of its batch's window.
_INPUT_SLACK_S = 24 * 3600
#: Endpoints that OpenAI's batches have beside ours.
_NOT_SERVED = frozenset(
    {"/v1/embeddings", "/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/videos"}
)
_REFUSED = {"output_expires_after": lambda value: value is None}
#: Bounds of a file's own expiry in seconds, as OpenAI has them.
_LEAST_EXPIRY_S, _MOST_EXPIRY_S = 3600, 30 * 24 * 3600


class BatchDesk:
    """What routes of files and batches work with."""

    def __init__(self, registry: Batches, settings: GatewaySettings) -> None:
        self.registry, self._settings = registry, settings
        self._queue: TaskQueue | None = None

    def close(self) -> None:
        """Close the connections to the queue of tasks."""
        if self._queue is not None:
            self._queue.close()

    def store(self) -> FileStore:
        """The store of contents; opened anew, which costs little and may block."""
        return FileStore(self._settings.files_store)

    async def add_file(self, tenant: str, file_id: str, form: FileForm) -> FileRecord:
        """Enter a file that was uploaded.

        Raises:
            InvalidRequestError: its purpose is none that is served, or its expiry is malformed.
            ServiceUnavailableError: Redis is away.
        """
        if form.fields.get("purpose") != "batch":
            raise InvalidRequestError("purpose: must be batch", param="purpose")
        now = await self.registry.clock_ms()
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=form.filename or "file",
            purpose="batch",
            bytes=form.size,
            created_ms=now,
            expires_ms=now + round(self._kept_s(form.fields) * 1e3),
        )
        await self.registry.add_file(record)
        return record

    async def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises NotFoundError, and ConflictError where a batch still reads it."""
        await self.registry.file(file_id, tenant)
        for batch_id in await self.registry.open_batches():
            try:
                record = await self.registry.batch(batch_id, tenant)
            except NotFoundError:  # somebody else's, or just gone
                continue
            if record.input_file == file_id and not record.ended:
                raise ConflictError(f"the file is the input of {batch_id}, which has not ended", param="id")
        store = await asyncio.to_thread(self.store)
        await asyncio.to_thread(store.delete, file_id)
        await self.registry.remove_file(file_id)

    async def create(self, caller: Caller, body: CreateBatchRequest) -> BatchRecord:
        """Enter a batch, and have it begun.

        Raises:
            InvalidRequestError: an endpoint, window, file or metadata that cannot be.
            ServiceUnavailableError: Redis is away, or there is none for tasks.
        """
        if body.endpoint not in ENDPOINTS:
            kind = UnsupportedParameterError if body.endpoint in _NOT_SERVED else InvalidRequestError
            raise kind(f"endpoint: must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        refuse(body, _REFUSED)
        if body.completion_window != "24h":
            raise InvalidRequestError("completion_window: must be 24h", param="completion_window")
        check_metadata(body.metadata)
        queue = self._task_queue()
        try:
            file = await self.registry.file(body.input_file_id, caller.tenant)
        except NotFoundError:
            raise InvalidRequestError("input_file_id: there is no such file", param="input_file_id") from None
        if file.purpose != "batch":
            raise InvalidRequestError("input_file_id: its purpose is not batch", param="input_file_id")
        now = await self.registry.clock_ms()
        record = BatchRecord(
            id=new_batch_id(),
            tenant=caller.tenant,
            authenticated=caller.authenticated,
            key=caller.key,
            endpoint=body.endpoint,
            input_file=file.id,
            created_ms=now,
            expires_ms=now + WINDOW_S * 1000,
            metadata=body.metadata,
            trace=dict(caller.trace or {}),
        )
        needed = record.expires_ms + _INPUT_SLACK_S * 1000
        if file.expires_ms < needed:
            await self.registry.add_file(replace(file, expires_ms=needed))
        await self.registry.add_batch(record)
        log.info("batch.created", batch=record.id, endpoint=record.endpoint)
        try:
            await asyncio.to_thread(queue.run_batch, record.id, record.slices)
        except RopewayError as error:  # a tasks process finds the record and begins it
            log.warning("batch.task_not_queued", batch=record.id, error=error.message)
        return record

    async def cancel(self, batch_id: str, tenant: str) -> BatchRecord:
        """Ask for a batch's end; what is done stays. Raises NotFoundError, and ConflictError where it has ended."""
        await self.registry.batch(batch_id, tenant)
        now = await self.registry.clock_ms()

        def change(held: BatchRecord) -> BatchRecord:
            if held.ended or held.status == "finalizing":
                raise ConflictError(f"Cannot cancel a batch with status '{held.status}'.")
            return held if held.status == "cancelling" else replace(held, status="cancelling", cancelling_ms=now)

        return await self.registry.change(batch_id, change)

    async def progress(self, record: BatchRecord) -> Progress:
        """How far a batch is."""
        if record.ended or record.outcome is not None:
            return Progress(seen_completed=record.completed, seen_failed=record.failed)
        return await self.registry.progress(record.id)

    def _kept_s(self, fields: dict[str, str]) -> float:
        anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return self._settings.files_retention_s
        if anchor != "created_at" or seconds is None or not seconds.isdecimal():
            raise InvalidRequestError("expires_after: needs anchor created_at, and seconds", param="expires_after")
        if len(seconds) > 9 or not _LEAST_EXPIRY_S <= int(seconds) <= _MOST_EXPIRY_S:
            raise InvalidRequestError(
                f"expires_after: seconds must be from {_LEAST_EXPIRY_S} to {_MOST_EXPIRY_S}", param="expires_after"
            )
        return min(float(seconds), self._settings.files_retention_s)

    def _task_queue(self) -> TaskQueue:
        if self._queue is None:
            try:
                self._queue = TaskQueue(tasks_url(self._settings), _TASK_TIMEOUT_S)
            except InvalidRequestError as error:
                raise ServiceUnavailableError(error.message) from None
        return self._queue
