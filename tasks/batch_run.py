"""A slice of a batch: from wherever it is, as far as it comes in its time. Whoever dies at it costs no line twice.

What is finished is written in parts of consecutive lines, each entered in Redis in one step with the number of the next
line; a part that was not entered is as if it had never been. Lines behind it may have run: their jobs have the same ids
whenever they are queued, so the next slice finds their results.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final, Literal

import structlog
from msgspec.structs import replace

from gateway.errors import body as error_body
from shared.batch_record import BatchRecord, BatchStatus, Fault, FileRecord, Progress
from shared.batches import Batches, made_file_id
from shared.errors import RopewayError
from shared.file_store import FileStore
from shared.protocol import ErrorInfo
from shared.tasks import cancel_all
from tasks.batch_engine import LineRunner, Outcome, line_runner
from tasks.batch_lines import Line, LineTooLongError, check_file, entry_of, read_lines
from tasks.batch_output import Part, join_parts, write_part

log = structlog.stdlib.get_logger("tasks.batch_run")

#: Lines and bytes after which a part is written, and seconds.
PART_LINES, PART_BYTES, PART_S = 256, 4 * 1024 * 1024, 5.0
#: Lines that may have been begun, or be done, behind the first one that is not done, in windows.
AHEAD: Final = 4
#: Bytes of lines and answers that are held at most before no further line is begun.
HELD_BYTES: Final = 48 * 1024 * 1024
#: Seconds between looks at the record, and signs of life.
LOOK_S: Final = 1.0
#: Seconds that jobs have to end once a batch is stopped.
STOP_S: Final = 60.0
#: Seconds by which clocks may differ.
_CLOCKS_S: Final = 2.0
#: Seconds after which a slice ends in any case.
MOST_S: Final = 600.0


class NotMineError(RopewayError):
    """Somebody else is at the batch now."""


@dataclass(slots=True)
class _Begun:
    """A line that was begun, or that never will be (`task` None)."""

    number: int
    custom_id: str
    size: int
    task: asyncio.Task[Outcome | None] | None


class BatchRun:
    """One slice of one batch.

    Args:
        token: with which the caller has begun it (`Batches.begin`); it is left in the end.
        others_wait: whether other tasks wait for their turn; blocks.
    """

    def __init__(
        self,
        batches: Batches,
        files: FileStore,
        batch_id: str,
        token: str,
        *,
        redis_url: str,
        window: int,
        slice_s: float,
        retention_s: float,
        max_line_bytes: int,
        others_wait: Callable[[], bool],
    ) -> None:
        self._batches, self._files, self._id = batches, files, batch_id
        self._redis_url, self._window, self._slice_s = redis_url, window, slice_s
        self._retention_s, self._max_line_bytes, self._others_wait = retention_s, max_line_bytes, others_wait
        self._token = token
        self._began = self._written = time.monotonic()
        self._stopped: float | None = None
        self._lost = self._yielding = self._expired = False
        self._progress = Progress()
        self._begun: deque[_Begun] = deque()
        self._in_flight = 0
        self._part = Part.empty()
        self._runner: LineRunner | None = None

    async def run(self) -> bool:
        """Do it; answers whether there is more to do.

        Raises:
            RopewayError: something passed away for now; another slice goes on.
        """
        watch = asyncio.create_task(self._watch(), name="watch")
        try:
            return await self._go_on()
        except NotMineError:
            log.warning("somebody else is at the batch", batch=self._id)
            return False
        finally:
            await cancel_all([watch])
            with suppress(RopewayError):  # it expires by itself
                await self._batches.leave(self._id, self._token)

    async def _go_on(self) -> bool:
        record = await self._batches.batch(self._id)
        if record.status == "validating":
            record = await self._validate(record)
        if record.status in ("in_progress", "cancelling") and record.outcome is None:
            if not await self._lines(record):
                return True
            record = await self._end_lines(record)
        if record.outcome is not None and not record.ended:
            await self._finish(record)
        elif record.ended:
            await self._close()
        return False

    async def _close(self) -> None:
        await asyncio.to_thread(self._files.drop_parts, self._id)
        await self._batches.close_batch(self._id)

    # The file as a whole

    async def _validate(self, record: BatchRecord) -> BatchRecord:
        try:
            total, faults = await asyncio.to_thread(self._check, record)
        except FileNotFoundError:
            total, faults = 0, [Fault(code="file_not_found", message="the input file is gone", param="input_file_id")]
        now = await self._batches.clock_ms()

        def change(held: BatchRecord) -> BatchRecord:
            if faults:
                return replace(held, status="failed", faults=faults, ended_ms=now)
            if held.status == "cancelling":
                return replace(held, total=total)
            return replace(held, status="in_progress", total=total, started_ms=now)

        return await self._batches.change(self._id, change, self._retention_s)

    def _check(self, record: BatchRecord) -> tuple[int, list[Fault]]:
        with self._files.open(record.input_file) as stream:
            return check_file(stream, record.endpoint, self._max_line_bytes)

    # Its lines

    async def _lines(self, record: BatchRecord) -> bool:
        """Run lines until all are done, or the batch is stopped; False where the slice ended before."""
        self._progress = await self._batches.progress(self._id)
        self._stop_if(record, await self._batches.clock_ms())
        try:
            stream = await asyncio.to_thread(self._files.open, record.input_file)
        except FileNotFoundError:
            await self._fail(Fault(code="file_not_found", message="the input file is gone", param="input_file_id"))
            return False
        try:
            async with line_runner(record, self._redis_url, self._stopping, AHEAD * self._window) as runner:
                self._runner = runner
                try:
                    return await self._window_of(record, runner, stream)
                finally:
                    await cancel_all([begun.task for begun in self._begun if begun.task is not None])
                    self._runner = None
        finally:
            await asyncio.to_thread(stream.close)

    async def _fail(self, fault: Fault) -> None:
        now = await self._batches.clock_ms()

        def change(held: BatchRecord) -> BatchRecord:
            return replace(held, status="failed", faults=[fault], ended_ms=now)

        await self._batches.change(self._id, change, self._retention_s)

    async def _window_of(self, record: BatchRecord, runner: LineRunner, stream: IO[bytes]) -> bool:
        gate = asyncio.Semaphore(self._window)
        lines = _from(read_lines(stream, self._max_line_bytes), self._progress.next_line)
        reach = self._progress.next_line + AHEAD * self._window if self._stopped is not None else None
        more = True
        while True:
            while more and len(self._begun) < AHEAD * self._window and self._held() < HELD_BYTES:
                if self._stopping() and reach is None:
                    reach = self._begun[-1].number + 1 if self._begun else self._progress.next_line
                line = await asyncio.to_thread(next, lines, None)
                beyond = line is not None and reach is not None and line.number >= reach
                if line is None or (beyond and not self._expired):
                    more = False
                    break
                self._begin(record, runner, gate, line, beyond)
            if not self._begun:
                break
            await self._take(record)
            if self._lost:
                raise NotMineError("another task is at the batch")
            if self._yielding and not self._stopping():
                await self._write(runner)
                return False
            if self._due():
                await self._write(runner)
        await self._write(runner)
        return True

    def _begin(
        self, record: BatchRecord, runner: LineRunner, gate: asyncio.Semaphore, line: Line, beyond: bool
    ) -> None:
        custom_id, body = entry_of(line)
        remaining_s = max(0.0, record.expires_ms / 1e3 - time.time())

        async def run() -> Outcome | None:
            async with gate:
                self._in_flight += 1
                try:
                    return await runner.run(line.number, body, remaining_s)
                finally:
                    self._in_flight -= 1

        task = None if beyond else asyncio.create_task(run(), name=f"line-{line.number}")
        self._begun.append(_Begun(line.number, custom_id, len(body), task))

    async def _take(self, record: BatchRecord) -> None:
        """Wait for the first line that is not done, for a moment, and take those that are."""
        first = self._begun[0].task
        if first is not None and not first.done():
            await asyncio.wait([first], timeout=LOOK_S / 4)
        late = self._stopped is not None and time.monotonic() - self._stopped > STOP_S
        while self._begun and self._part.bytes < PART_BYTES and self._part.lines < PART_LINES:
            begun = self._begun[0]
            if begun.task is not None and not begun.task.done():
                if not late:
                    return
                await cancel_all([begun.task])
            outcome = None if begun.task is None or begun.task.cancelled() else begun.task.result()
            if outcome is not None:
                self._part.add(self._id, begun.number, begun.custom_id, outcome)
            elif self._expired or record.expires_ms / 1e3 <= time.time() + _CLOCKS_S:
                # The deadline of its job, which is the batch's, may be noticed before this process looks.
                self._part.add_expired(self._id, begun.number, begun.custom_id)
            elif not self._stopping():
                self._part.add(self._id, begun.number, begun.custom_id, _cancelled())
            self._begun.popleft()
            self._progress = replace(self._progress, next_line=begun.number + 1)

    def _due(self) -> bool:
        part = self._part
        full = part.lines >= PART_LINES or part.bytes >= PART_BYTES
        return full or (part.lines > 0 and time.monotonic() - self._written > PART_S)

    async def _write(self, runner: LineRunner) -> None:
        """Write what has gathered, and enter it."""
        part, self._part = self._part, Part.empty()
        progress = replace(
            self._progress,
            completed=self._progress.completed + part.completed,
            failed=self._progress.failed + part.failed,
        )
        name = ""
        if part.bytes:
            name = f"{progress.next_line}-{secrets.token_hex(16)}"
            await asyncio.to_thread(write_part, self._files, self._id, name, part)
        if not await self._batches.advance(self._id, self._token, progress, name, part.outcomes):
            raise NotMineError("another task is at the batch")
        self._progress, self._written = progress, time.monotonic()
        await runner.forget(part.job_ids)

    def _held(self) -> int:
        """Bytes of lines that were begun and of answers that wait for one before them."""
        held = self._part.bytes
        for begun in self._begun:
            held += begun.size
            task = begun.task
            if task is not None and task.done() and not task.cancelled() and (outcome := task.result()) is not None:
                held += len(outcome.body)
        return held

    # Its end

    async def _end_lines(self, record: BatchRecord) -> BatchRecord:
        now = await self._batches.clock_ms()
        progress = self._progress

        def change(held: BatchRecord) -> BatchRecord:
            whole = progress.completed + progress.failed >= held.total
            status: BatchStatus = "finalizing"
            outcome: Literal["completed", "expired", "cancelled"] = "completed"
            if held.status == "cancelling":
                status, outcome = held.status, "cancelled"
            elif self._expired or not whole:
                outcome = "expired"
            return replace(
                held, status=status, outcome=outcome, completed=progress.completed, failed=progress.failed,
                finalizing_ms=now,
            )  # fmt: skip

        return await self._batches.change(self._id, change)

    async def _finish(self, record: BatchRecord) -> None:
        parts = await self._batches.parts(self._id)
        now = await self._batches.clock_ms()
        made: dict[str, str | None] = {}
        for kind, word in (("out", "output"), ("err", "error")):
            file_id = made_file_id(self._id, kind)
            size = await asyncio.to_thread(join_parts, self._files, record, parts, kind, file_id)
            made[kind] = file_id if size else None
            if size:
                await self._batches.add_file(
                    FileRecord(
                        id=file_id,
                        tenant=record.tenant,
                        filename=f"{self._id}_{word}.jsonl",
                        purpose="batch_output",
                        bytes=size,
                        created_ms=now,
                        expires_ms=now + round(self._retention_s * 1e3),
                    )
                )
        outcome = record.outcome or "completed"

        def change(held: BatchRecord) -> BatchRecord:
            if held.ended:
                return held
            return replace(held, status=outcome, output_file=made["out"], error_file=made["err"], ended_ms=now)

        await self._batches.change(self._id, change, self._retention_s)
        await self._close()
        log.info("batch ended", batch=self._id, status=outcome, completed=record.completed, failed=record.failed)

    # What happens meanwhile

    def _stopping(self) -> bool:
        return self._stopped is not None

    def _stop_if(self, record: BatchRecord, now_ms: int) -> None:
        """Stop where the batch is to be cancelled, or has expired."""
        self._expired = record.status != "cancelling" and record.expires_ms <= now_ms
        if (self._expired or record.status == "cancelling") and self._stopped is None:
            self._stopped = time.monotonic()

    async def _watch(self) -> None:
        """Show signs of life and progress; see whether the batch is to be stopped, or others are to have their turn."""
        while True:
            try:
                await self._look()
            except RopewayError as error:
                log.warning("look at a batch failed", batch=self._id, why=error.message)
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        if not await self._batches.stay(self._id, self._token):
            self._lost = True
        record = await self._batches.batch(self._id)
        before = self._stopped
        if self._runner is not None:
            self._stop_if(record, await self._batches.clock_ms())
            done, failed = self._shown()
            await self._batches.show(self._id, done, failed, self._in_flight)
            if before is None and self._stopped is not None:
                await self._runner.cancel_all()
        ran_s = time.monotonic() - self._began
        if ran_s > MOST_S or (ran_s > self._slice_s and await asyncio.to_thread(self._others_wait)):
            self._yielding = True

    def _shown(self) -> tuple[int, int]:
        done, failed = self._progress.completed + self._part.completed, self._progress.failed + self._part.failed
        for begun in self._begun:
            task = begun.task
            if task is not None and task.done() and not task.cancelled() and (outcome := task.result()) is not None:
                done, failed = done + outcome.done, failed + (not outcome.done)
        return done, failed


def _from(lines: Iterator[Line], first: int) -> Iterator[Line]:
    """Lines from a number on; one that is too long, which validation has refused, ends them."""
    with suppress(LineTooLongError):
        yield from (line for line in lines if line.number >= first)


def _cancelled() -> Outcome:
    info = ErrorInfo(message="The job of this line was cancelled", type="server_error", code="job_cancelled")
    return Outcome(500, error_body(info))
