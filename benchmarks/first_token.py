"""A client that measures the time to the first token of a stream and adds little to it: one connection, no parsing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import uvloop

_FIRST, _END = b"data: ", b"data: [DONE]\n\n\r\n0\r\n\r\n"


def first_tokens(port: int, model: str, prompt: Sequence[int], count: int) -> list[float]:
    """Seconds to the first token of `count` streams of one token, one after the other.

    Raises:
        RuntimeError: a stream was refused, or broke off.
    """
    times: list[float] = uvloop.run(_first_tokens(port, _request(model, prompt), count))
    return times


def _request(model: str, prompt: Sequence[int]) -> bytes:
    body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _first_tokens(port: int, request: bytes, count: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(request)
        seen, first = b"", 0.0
        while not seen.endswith(_END):
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError(f"the stream broke off: {seen[-200:]!r}")
            seen += data
            if not seen.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the stream was refused: {seen[:500]!r}")
            if not first and _FIRST in seen:
                first = time.perf_counter() - began
        times.append(first)
    writer.close()
    return times
