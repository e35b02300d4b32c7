"""The pool's two channels: `wake` says which lane has work, `ctl` cancels jobs, pauses, and tells of adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import redis
import redis.asyncio
import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from shared import keys
from worker.metrics import WorkerMetrics
from worker.publisher import REDIS_TROUBLE

_log = structlog.stdlib.get_logger("worker.control")


#: See `ControlListener`.
PING_S, LOST_S = 5.0, 10.0


class ControlMessage(msgspec.Struct, frozen=True):
    """What `ctl` carries, as a msgpack map: `cancel`, `pause`, `unpause`, `adapters`. An unknown `op` is ignored."""

    op: str
    id: str = ""


_decoder = msgspec.msgpack.Decoder(ControlMessage)

#: A lane's number has no more digits. Anyone may publish on a channel, and `int` refuses thousands of them.
_LANE_DIGITS = len(str(keys.MAX_LANES))


class ControlListener:
    """Listens on both channels.

    Args:
        on_wake: called with a lane.
        on_cancel: called with a job id.
        on_pause: called with whether the pool is paused now.
        on_adapters: called when the pool's adapters are others.
        on_subscribed: called after each (re)subscription: what was sent before it is lost.
        ping_s: seconds of silence after which the server is asked whether it is there.
        lost_s: seconds of silence after which the connection counts as lost. Keep-alive of TCP does not see a proxy
            that holds everything back.

    Attributes:
        heard_at: monotonic seconds of the last message or answer; what was sent before the question has arrived too.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        pool: str,
        metrics: WorkerMetrics,
        *,
        on_wake: Callable[[int], None],
        on_cancel: Callable[[str], None],
        on_pause: Callable[[bool], None],
        on_subscribed: Callable[[], None],
        on_adapters: Callable[[], None] = lambda: None,
        ping_s: float = PING_S,
        lost_s: float = LOST_S,
    ) -> None:
        self._client, self._metrics = client, metrics
        self._ping_s, self._lost_s = ping_s, lost_s
        self.heard_at = float("-inf")
        self._wake, self._control = keys.wake(pool).encode(), keys.control(pool).encode()
        self._on_wake, self._on_cancel, self._on_subscribed = on_wake, on_cancel, on_subscribed
        self._on_pause, self._on_adapters = on_pause, on_adapters

    async def run(self) -> None:
        """Listen until cancelled; subscribe again whenever the connection is lost."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(REDIS_TROUBLE),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            before_sleep=lambda state: self._metrics.redis_errors.inc(),
        ):
            with attempt:
                async with self._client.pubsub() as pubsub:
                    await pubsub.subscribe(self._wake, self._control)
                    await self._listen(pubsub)

    async def _listen(self, pubsub: Any) -> None:
        """Hand messages on until the connection is lost, or silent for too long."""
        began, asked = time.monotonic(), False
        while True:
            message = await pubsub.get_message(timeout=self._ping_s)
            now = time.monotonic()
            if message is not None:
                self.heard_at, asked = now, False
                self._handle(message["type"], message["channel"], message["data"])
            elif now - max(began, self.heard_at) > self._lost_s:
                _log.warning("the subscription is silent, taking another one", seconds=self._lost_s)
                raise redis.ConnectionError("the subscription is silent")
            elif not asked:
                asked = True
                await pubsub.ping()

    def _handle(self, kind: str, channel: bytes, data: bytes) -> None:
        if kind == "subscribe" and channel == self._control:
            self._on_subscribed()
        elif kind == "message" and channel == self._wake:
            if data.isdigit() and len(data) <= _LANE_DIGITS:
                self._on_wake(int(data))
        elif kind == "message" and channel == self._control:
            try:
                message = _decoder.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                _log.warning("control message does not decode", error=str(error))
                return
            if message.op == "cancel":
                self._on_cancel(message.id)
            elif message.op in ("pause", "unpause"):
                self._on_pause(message.op == "pause")
            elif message.op == "adapters":
                self._on_adapters()
