"""One pub/sub connection of this process, fanned out to all of its streams.

The connection is owned by one task: it connects, subscribes to every channel in use, reads, and starts again with
back-off when the connection is lost. Streams never touch it; they leave subscriptions in a list that a second task
sends. A message goes into the bounded queue of each of its channel's tracks; what overflows is read from the log.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from types import TracebackType

import redis.asyncio
import redis.exceptions
import structlog
from redis.asyncio.connection import AbstractConnection
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from gateway.following import Follower, Track
from gateway.metrics import GatewayMetrics
from shared.errors import OverloadedError, ServiceUnavailableError
from shared.jobstore import JobStore
from shared.tasks import cancel_all

log = structlog.get_logger(__name__)

#: How often silent tracks are looked for.
TICK_S = 0.25
#: A connection that is silent for so long is asked whether it lives, and given up after twice that.
PING_S = 5.0
#: How long a new stream waits until its subscription is confirmed.
CONFIRM_S = 5.0
_CONNECTION_ERRORS = (redis.exceptions.RedisError, OSError)


class _Channel:
    """A channel in use. `unconfirmed` counts SUBSCRIBEs whose confirmation has not come."""

    __slots__ = ("confirmed", "tracks", "unconfirmed")

    def __init__(self) -> None:
        self.tracks: set[Track] = set()
        self.unconfirmed = 0
        self.confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Hub:
    """All streams of this process over one connection.

    Args:
        client: of `shared.connect.connect_pubsub`; the hub takes one connection of it.
        store: where logs are read.
        max_streams: above it `follow` refuses.
        queue_frames: frames held per track.
        idle_s: see `Follower`.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        store: JobStore,
        metrics: GatewayMetrics,
        *,
        max_streams: int,
        queue_frames: int,
        idle_s: float,
    ) -> None:
        self._client, self._store, self._metrics = client, store, metrics
        self._max_streams, self._queue_frames, self._idle_s = max_streams, queue_frames, idle_s
        self._channels: dict[bytes, _Channel] = {}
        self._listeners: dict[bytes, Callable[[bytes | None], None]] = {}
        self._followers: set[Follower] = set()
        self._commands: list[tuple[bytes, bytes]] = []
        self._wanted = asyncio.Event()
        self._connection: AbstractConnection | None = None
        self._heard, self._answered = time.monotonic(), False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Whether the connection stands."""
        return self._connection is not None

    @property
    def alive(self) -> bool:
        """Whether the tasks behind it run; they end only with the process."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    @property
    def followers(self) -> frozenset[Follower]:
        """Streams that are open now, as they are."""
        return frozenset(self._followers)

    @property
    def streams(self) -> int:
        """Streams that are open now."""
        return len(self._followers)

    async def __aenter__(self) -> Hub:
        self._tasks = [
            asyncio.create_task(task, name=f"hub-{name}")
            for name, task in (("reader", self._run()), ("writer", self._write()), ("ticker", self._tick()))
        ]
        for task in self._tasks:
            task.add_done_callback(_report)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await cancel_all(self._tasks)

    async def follow(self, job_ids: Iterable[str], after: int = 0) -> Follower:
        """Subscribe to jobs, and answer when the subscriptions stand: a job submitted from now on is heard whole.

        The caller closes the follower (it is an async context manager).

        Raises:
            OverloadedError: too many streams.
            ServiceUnavailableError: the connection does not stand.
            JobNotFoundError: not a job's id.
        """
        if len(self._followers) >= self._max_streams:
            raise OverloadedError("too many streams are open on this gateway", code="too_many_streams", retry_after=1)
        tracks = [Track(i, job_id, after, self._queue_frames, self._metrics) for i, job_id in enumerate(job_ids)]
        follower = Follower(self._store, tracks, self._leave, self._idle_s)
        self._followers.add(follower)
        confirmations = [self._join(track) for track in tracks]
        try:
            async with asyncio.timeout(CONFIRM_S):
                for confirmation in confirmations:
                    await asyncio.shield(confirmation)
        except TimeoutError:
            self._leave(follower)
            raise ServiceUnavailableError("the queue cannot be reached", retry_after=1) from None
        except BaseException:
            self._leave(follower)
            raise
        return follower

    def listen(self, channel: str, heard: Callable[[bytes | None], None]) -> None:
        """Have messages of one more channel, for as long as the hub lives.

        Args:
            heard: called with each; with None where the subscription stands anew, and some may have been missed.
        """
        name = channel.encode()
        self._listeners[name] = heard
        self._command(b"SUBSCRIBE", name)

    def _join(self, track: Track) -> asyncio.Future[None]:
        name = track.channel
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel()
            self._command(b"SUBSCRIBE", name)
        channel.tracks.add(track)
        return channel.confirmed

    def _leave(self, follower: Follower) -> None:
        if follower not in self._followers:
            return
        self._followers.discard(follower)
        for track in follower.tracks:
            name = track.channel
            channel = self._channels.get(name)
            if channel is None:
                continue
            channel.tracks.discard(track)
            if not channel.tracks:
                del self._channels[name]
                channel.confirmed.cancel()
                self._command(b"UNSUBSCRIBE", name)

    def _command(self, verb: bytes, name: bytes) -> None:
        """Leave a command to the writer; without a connection the next one subscribes to what is in use then."""
        if self._connection is not None:
            self._commands.append((verb, name))
            self._wanted.set()

    async def _run(self) -> None:
        """Connect and serve for ever; the back-off grows until a connection has answered anything."""
        while True:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(_CONNECTION_ERRORS),
                wait=wait_random_exponential(multiplier=0.05, max=2.0),
            ):
                with attempt:
                    await self._once()

    async def _once(self) -> None:
        """One connection's life. Returns if it worked and was lost, raises if it never worked."""
        try:
            connection = await self._client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        except _CONNECTION_ERRORS as error:
            log.warning("hub.cannot_connect", error=str(error))
            raise
        try:
            await self._serve(connection)
        except _CONNECTION_ERRORS as error:
            log.warning("hub.connection_lost", error=str(error), channels=len(self._channels))
            self._metrics.reconnects.inc()
            if not self._answered:
                raise
        finally:
            self._connection = None
            await connection.disconnect(nowait=True)
            await self._client.connection_pool.release(connection)

    async def _serve(self, connection: AbstractConnection) -> None:
        """Subscribe to every channel in use, then read until the connection breaks."""
        self._commands.clear()
        for channel in self._channels.values():
            channel.unconfirmed = 0
        self._connection, self._heard, self._answered = connection, time.monotonic(), False
        for name in (*self._channels, *self._listeners):
            self._command(b"SUBSCRIBE", name)
        log.info("hub.connected", channels=len(self._channels))
        while True:
            message = await connection.read_response(timeout=math.inf, disconnect_on_error=False, push_request=True)
            self._heard, self._answered = time.monotonic(), True
            if isinstance(message, list) and len(message) == 3:
                self._receive(message[0], message[1], message[2])
            elif isinstance(message, Exception):
                raise message

    def _receive(self, kind: bytes, name: bytes, data: object) -> None:
        heard = self._listeners.get(name)
        if heard is not None and kind in (b"message", b"subscribe"):
            heard(data if kind == b"message" and isinstance(data, bytes) else None)
            return
        channel = self._channels.get(name)
        if channel is None:
            return
        if kind == b"message" and isinstance(data, bytes):
            for track in channel.tracks:
                track.push(data)
        elif kind == b"subscribe":
            channel.unconfirmed = max(0, channel.unconfirmed - 1)
            if channel.unconfirmed:
                return
            if not channel.confirmed.done():
                channel.confirmed.set_result(None)
            else:  # a reconnect: what was published meanwhile is in the log
                for track in channel.tracks:
                    track.look()

    async def _write(self) -> None:
        """Send what streams have asked for, runs of one verb as one command."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            connection, commands, self._commands = self._connection, self._commands, []
            try:
                for verb, run in groupby(commands, key=lambda command: command[0]):
                    names = [name for _, name in run]
                    # A closed connection would open itself again to send; the reader alone does that.
                    if connection is None or connection is not self._connection or not connection.is_connected:
                        break
                    if verb == b"SUBSCRIBE":
                        self._count(names)
                    await connection.send_command(verb, *names, check_health=False)
            except _CONNECTION_ERRORS as error:
                # The reader sees the same and reconnects; it then subscribes to all that is in use.
                log.debug("hub.write_failed", error=str(error))
                if connection is not None:
                    await connection.disconnect(nowait=True)

    def _count(self, names: list[bytes]) -> None:
        for name in names:
            channel = self._channels.get(name)
            if channel is not None:
                channel.unconfirmed += 1

    async def _tick(self) -> None:
        """Wake tracks that are silent, and find out whether a silent connection lives."""
        pinged = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for track in self._tracks():
                track.tick(now)
            for follower in self._followers:
                follower.tick(now)
            connection = self._connection
            if connection is None or now - self._heard < PING_S:
                continue
            if now - self._heard > 2 * PING_S:
                log.warning("hub.silent", seconds=round(now - self._heard, 1))
                await connection.disconnect(nowait=True)
            elif now - pinged > PING_S:
                pinged = now
                self._command(b"PING", b"")

    def _tracks(self) -> Iterator[Track]:
        for channel in self._channels.values():
            yield from channel.tracks


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("hub.task_failed", task=task.get_name(), exc_info=error)
