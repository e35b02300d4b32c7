"""What anyone may publish on the pool's channels: it never ends the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from shared.connect import connect, connect_pubsub
from tests.support.redis_proxy import RedisProxy
from worker.control import ControlListener
from worker.metrics import WorkerMetrics

WAKE, CONTROL = b"rw:{pool}:wake", b"rw:{pool}:ctl"


class Channels:
    """A client whose subscription gives these messages and then fails for good."""

    def __init__(self, messages: list[tuple[bytes, bytes]]) -> None:
        self.messages = messages

    @asynccontextmanager
    async def pubsub(self) -> AsyncIterator[Channels]:
        yield self

    async def subscribe(self, *names: bytes) -> None:
        assert names == (WAKE, CONTROL)

    async def get_message(self, timeout: float) -> dict[str, Any]:
        if not self.messages:
            raise LookupError
        channel, data = self.messages.pop(0)
        return {"type": "message", "channel": channel, "data": data}


async def heard(*messages: tuple[bytes, bytes], pauses: list[bool] | None = None) -> tuple[list[int], list[str]]:
    pauses = [] if pauses is None else pauses
    lanes: list[int] = []
    cancelled: list[str] = []
    listener = ControlListener(
        cast(Any, Channels(list(messages))), "pool", WorkerMetrics("m"),
        on_wake=lanes.append, on_cancel=cancelled.append, on_pause=pauses.append, on_subscribed=lambda: None,
    )  # fmt: skip
    with pytest.raises(LookupError):
        await listener.run()
    return lanes, cancelled


@pytest.mark.parametrize("data", [b"", b"-1", b"1.0", b"\xc2\xb2", b"\xff\xfe", b"9" * 5000, b"x" * 10**6])
async def test_a_wake_that_is_no_lane_is_ignored(data: bytes) -> None:
    assert await heard((WAKE, data), (WAKE, b"3")) == ([3], [])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\x01",
        b"{}",
        b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
        b"\x82\xa2op\xa2\xff\xfe\xa2id\xa1x",
        b"\x82\xa2op\xa6cancel\xa2id\x01",
        b"\x81\xa2op\xdb\xff\xff\xff\xff",
    ],
)
async def test_a_control_message_that_does_not_read_is_ignored(data: bytes) -> None:
    good = msgspec.msgpack.encode({"op": "cancel", "id": "j"})
    assert await heard((CONTROL, data), (CONTROL, good)) == ([], ["j"])


async def test_pausing_is_heard_in_order() -> None:
    pauses: list[bool] = []
    messages = [(CONTROL, msgspec.msgpack.encode({"op": op})) for op in ("pause", "unknown", "unpause", "pause")]
    assert await heard(*messages, pauses=pauses) == ([], [])
    assert pauses == [True, False, True]


async def test_a_subscription_that_falls_silent_is_taken_anew(valkey_url: str) -> None:
    """Everything is held back, and no connection is closed: as behind a proxy that is stuck."""
    lanes: list[int] = []
    subscribed, woken = asyncio.Event(), asyncio.Event()

    def wake(lane: int) -> None:
        lanes.append(lane)
        woken.set()

    async with RedisProxy(valkey_url) as proxy:
        far, near = connect_pubsub(proxy.url), connect(valkey_url)
        listener = ControlListener(
            far, "pool", WorkerMetrics("m"),
            on_wake=wake, on_cancel=lambda _: None, on_pause=lambda _: None, on_subscribed=subscribed.set,
            ping_s=0.2, lost_s=1.0,
        )  # fmt: skip
        task = asyncio.create_task(listener.run())
        async with asyncio.timeout(20):
            await subscribed.wait()
            subscribed.clear()
            # Longer than any silence that it puts up with: what is asked is answered.
            await asyncio.sleep(1.5)
            await near.publish(WAKE, b"1")
            await woken.wait()
            assert not subscribed.is_set(), "silence alone is no loss"
            heard_at = listener.heard_at
            while listener.heard_at == heard_at:
                await asyncio.sleep(0.01)
            proxy.hold(requests=True)
            await near.publish(WAKE, b"2")
            await asyncio.sleep(1.5)
            proxy.go_on()
            await subscribed.wait()
            woken.clear()
            await near.publish(WAKE, b"3")
            await woken.wait()
        assert lanes[0] == 1 and lanes[-1] == 3
        while not task.done():  # one cancel can get lost in the library's time-out
            task.cancel()
            await asyncio.wait([task], timeout=1.0)
        await far.aclose()
        await near.aclose()
