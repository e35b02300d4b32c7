"""Following jobs: frames from the channel as long as none is missing, from the log whenever one might be."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import structlog

from gateway.errors import JobLostError
from gateway.metrics import GatewayMetrics
from shared import keys
from shared.errors import JobNotFoundError, ProtocolError, ServiceUnavailableError
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import FINAL_STATUSES, Frame, JobStatus, decode

log = structlog.get_logger(__name__)

#: Seconds of silence after which the log is read, doubled with each fruitless look up to the second.
FIRST_LOOK_S = 1.0
LAST_LOOK_S = 15.0
#: Frames read from the log at once: at first, and at most; in between about so many bytes at the size of those before.
FIRST_PAGE, PAGE, PAGE_BYTES = 8, 256, 2 * 1024 * 1024
#: Looks at the log that do not bring a missing frame until it counts as lost.
MAX_FRUITLESS = 5


class Track:
    """One job as one stream follows it: sequence number reached, and frames that wait.

    The queue is bounded. When it overflows it is emptied and the log takes its place, so a slow reader costs no
    memory here.
    """

    __slots__ = ("_due", "_fruitless", "_metrics", "_page", "_pause", "_queue", "_size", "channel", "ended", "follower",
                 "index", "job_id", "log_reads", "needs_log", "overflows", "seq", "silent", "status")  # fmt: skip

    def __init__(self, index: int, job_id: str, after: int, size: int, metrics: GatewayMetrics) -> None:
        self.index, self.job_id, self.seq, self.ended = index, job_id, after, False
        self.channel = keys.events(JobId.parse(job_id)).encode()
        self.needs_log, self.silent = False, False
        self.log_reads = self.overflows = 0
        self.status: JobStatus = "queued"
        self.follower: Follower | None = None
        self._queue: deque[bytes] = deque()
        self._size, self._metrics, self._page = size, metrics, FIRST_PAGE
        self._pause, self._due, self._fruitless = FIRST_LOOK_S, time.monotonic() + FIRST_LOOK_S, 0

    def push(self, data: bytes) -> None:
        """A message of the channel; an empty one stands for a frame that is in the log alone."""
        if not data:
            self.look()
            return
        if len(self._queue) >= self._size:
            self._queue.clear()
            self.needs_log = True
            self.overflows += 1
            self._metrics.overflows.inc()
        self._queue.append(data)
        self._wake()

    @property
    def waiting(self) -> int:
        """Frames in the queue."""
        return len(self._queue)

    def look(self) -> None:
        """The log may have more: read it."""
        self.needs_log = True
        self._wake()

    def tick(self, now: float) -> None:
        """Time passes: after a while without a frame the job is looked at."""
        if now >= self._due and not self.ended:
            self._due = now + self._pause
            self.silent = True
            self._wake()

    async def take(self, store: JobStore) -> list[Frame]:
        """Frames that are next in order; empty if there are none yet. `needs_log` says that there may be more at once.

        Raises:
            JobLostError: the queue does not know the job any more, or a frame of it is gone.
            ServiceUnavailableError: Redis is away; calling again goes on from the same place.
            ProtocolError: a frame in the log that cannot be read.
        """
        if self.silent:
            await self._ask(store)
            self.silent = False
        frames: list[Frame] = []
        gap = self._drain(frames)
        # What was taken is given away before anything is awaited that may fail.
        if not frames and (gap or self.needs_log) and not self.ended:
            full = await self._read(store, frames)
            gap = self._drain(frames)
            # A gap that the log does not fill either is looked at again after a silence, not in a loop.
            self.needs_log = full or (gap and bool(frames))
        elif gap:
            self.needs_log = True
        if frames:
            self._fruitless, self._pause = 0, FIRST_LOOK_S
            self._due = time.monotonic() + FIRST_LOOK_S
        return frames

    def _drain(self, frames: list[Frame]) -> bool:
        """Take from the queue as long as no number is missing; True if one is."""
        while self._queue and not self.ended:
            try:
                frame = decode(self._queue[0], Frame)
            except ProtocolError as error:
                log.warning("follow.unreadable_message", job_id=self.job_id, error=error.message)
                self._queue.popleft()
                return True
            if frame.seq > self.seq + 1:
                return True
            self._queue.popleft()
            self._accept(frame, frames)
        return False

    def _accept(self, frame: Frame, frames: list[Frame]) -> None:
        if frame.seq != self.seq + 1 or self.ended:
            return
        self.seq = frame.seq
        self.ended = frame.last
        if frame.status is not None:
            self.status = frame.status
        frames.append(frame)

    async def _read(self, store: JobStore, frames: list[Frame]) -> bool:
        """One page of the log; True if it was full, so that there may be more."""
        self.log_reads += 1
        self._metrics.log_reads.inc()
        before, most = self.seq, self._page
        page = await store.read_log(self.job_id, self.seq, most)
        for data in page:
            self._accept(decode(data, Frame), frames)
        if page and self.seq == before:
            raise JobLostError(f"events of job {self.job_id} are missing", code="events_expired")
        if page:
            self._page = max(1, min(PAGE, PAGE_BYTES * len(page) // sum(map(len, page))))
        return len(page) >= most

    async def _ask(self, store: JobStore) -> None:
        """After silence: does the job live, and has its log more than was heard?"""
        self._pause = min(self._pause * 2, LAST_LOOK_S)
        try:
            self.status, last = await store.status(self.job_id)
        except JobNotFoundError:
            raise JobLostError(f"the queue does not know job {self.job_id} any more") from None
        if last > self.seq:
            self.needs_log = True
        elif self._queue or (self.status in FINAL_STATUSES and not self.ended):
            self._fruitless += 1
            if self._fruitless >= MAX_FRUITLESS:
                raise JobLostError(f"events of job {self.job_id} are missing", code="events_expired")

    def _wake(self) -> None:
        if self.follower is not None:
            self.follower.ready(self)


class Follower:
    """The tracks of one stream. One task reads it; close it when done.

    `idle_s` is how often `next` returns while nothing comes: its caller sends keep-alives and minds deadlines.
    """

    def __init__(
        self, store: JobStore, tracks: Sequence[Track], leave: Callable[[Follower], None], idle_s: float
    ) -> None:
        self._store, self._leave, self._idle_s = store, leave, idle_s
        self.tracks = list(tracks)
        self._ready: dict[Track, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._nudged = False
        self._idle_due = time.monotonic() + self._idle_s
        for track in self.tracks:
            track.follower = self

    async def __aenter__(self) -> Follower:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the subscriptions back. Harmless to repeat."""
        self._leave(self)

    @property
    def ended(self) -> bool:
        """Every job has sent its last frame."""
        return all(track.ended for track in self.tracks)

    async def next(self) -> list[tuple[int, Frame]]:
        """Frames that have come, each with its track's index; empty after a silence or a `nudge`.

        While Redis is away it answers nothing and goes on where it was when Redis is back.

        Raises:
            JobLostError: see `Track.take`.
            ProtocolError: a frame that cannot be read.
        """
        if not self._ready and not self._nudged:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._nudged = False
        self._idle_due = time.monotonic() + self._idle_s
        ready, self._ready = self._ready, {}
        result: list[tuple[int, Frame]] = []
        for track in ready:
            try:
                result += [(track.index, frame) for frame in await track.take(self._store)]
            except ServiceUnavailableError as error:
                log.warning("follow.redis_away", job_id=track.job_id, error=error.message)
                track.needs_log = True  # for when the ticker wakes it again
                continue
            if track.needs_log and not track.ended:
                self._ready[track] = None
        return result

    def ready(self, track: Track) -> None:
        """A track has something to look at."""
        self._ready[track] = None
        self._wake()

    def nudge(self) -> None:
        """Make `next` return."""
        self._nudged = True
        self._wake()

    def tick(self, now: float) -> None:
        """Time passes."""
        if now >= self._idle_due:
            self.nudge()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
