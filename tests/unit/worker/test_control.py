"""What anyone may publish on the pool's channels: it never ends the worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from worker.control import ControlListener
from worker.metrics import WorkerMetrics

WAKE, CONTROL = b"rw:{pool}:wake", b"rw:{pool}:ctl"


class Channels:
    """A client whose subscription gives these messages and then ends."""

    def __init__(self, messages: list[tuple[bytes, bytes]]) -> None:
        self.messages = messages

    @asynccontextmanager
    async def pubsub(self) -> AsyncIterator[Channels]:
        yield self

    async def subscribe(self, *names: bytes) -> None:
        assert names == (WAKE, CONTROL)

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        for channel, data in self.messages:
            yield {"type": "message", "channel": channel, "data": data}


async def heard(*messages: tuple[bytes, bytes], pauses: list[bool] | None = None) -> tuple[list[int], list[str]]:
    pauses = [] if pauses is None else pauses
    lanes: list[int] = []
    cancelled: list[str] = []
    listener = ControlListener(
        cast(Any, Channels(list(messages))), "pool", WorkerMetrics("m"),
        on_wake=lanes.append, on_cancel=cancelled.append, on_pause=pauses.append, on_subscribed=lambda: None,
    )  # fmt: skip
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
