"""Two servers with the OpenAI interface under the same streams, and the client that counts them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import httpx
import uvloop

from benchmarks.peer_contenders import Work, vllm_environment
from benchmarks.peer_process import Child, environment
from tests.support.stack import Stack, free_port

_FIRST, _END = b"data: ", b"data: [DONE]"
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
#: Bytes at the end of a stream that are kept: usage and [DONE] are in them.
_TAIL = 2048
_READY_S = 600.0


class HttpServer(Protocol):
    """A server that is held still until its streams run."""

    port: int
    model: str

    def go_on(self) -> None:
        """Let it run, and return when it answers."""

    def hold(self) -> None:
        """Stop all its processes."""


class _Stream(asyncio.Protocol):
    """One request on a connection of its own; bytes are searched, not parsed."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.first_at = 0.0
        self.tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL:]
        if not self.first_at and _FIRST in self.tail:
            self.first_at = time.perf_counter()
        if _END in self.tail:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def run_streams(server: HttpServer, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[float]]:
    """Stream all prompts at once.

    Returns:
        Seconds until the last stream's end, and for each stream those to its first event.

    Raises:
        RuntimeError: a stream had other than `new_tokens` tokens, or was refused.
    """
    requests = [_request(server.model, prompt, new_tokens) for prompt in prompts]
    return uvloop.run(_run(server.port, requests, new_tokens))


async def _run(port: int, requests: Sequence[bytes], new_tokens: int) -> tuple[float, list[float]]:
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    opened = await asyncio.gather(
        *(loop.create_connection(lambda request=request: _Stream(request), "127.0.0.1", port) for request in requests)  # type: ignore[misc]
    )
    streams = [stream for _, stream in opened]
    await asyncio.gather(*(stream.done for stream in streams))
    seconds = time.perf_counter() - start
    for transport, stream in opened:
        transport.close()
        usage = _USAGE.findall(stream.tail)
        if _END not in stream.tail or not usage or int(usage[-1]) != new_tokens:
            raise RuntimeError(f"a stream did not give {new_tokens} tokens: {stream.tail[-500:]!r}")
    return seconds, [stream.first_at - start for stream in streams]


def _request(model: str, prompt: Sequence[int], new_tokens: int) -> bytes:
    body = {"model": model, "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class RopewayServer:
    """Gateway, Redis and one worker, each a process, as `ropeway serve` runs them."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._stack = Stack(model=model, dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False)

    def __enter__(self) -> RopewayServer:
        self._stack.__enter__()
        try:
            self._stack.start_gateway()
            self._stack.start_worker()
            self._stack.wait_ready()
        except BaseException:
            self._stack.__exit__(None, None, None)
            raise
        self.port = self._stack.gateway_port
        return self

    def __exit__(self, *exc: object) -> None:
        self.go_on()
        self._stack.__exit__(None, None, None)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self._stack.wait_ready()

    def hold(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._stack.processes:
            if process.popen.poll() is None:
                os.kill(process.popen.pid, number)


class VllmServer:
    """vLLM's OpenAI server on its CPU build.

    Raises:
        PeerError: it ended before it was ready, or was not ready in time.
    """

    model = "peer"

    def __init__(self, python: str, folder: Path, threads: int, *, eager: bool) -> None:
        self.port = free_port()
        self._mode = "eager" if eager else "torch.compile"
        options = {"--model": folder, "--served-model-name": self.model, "--dtype": "bfloat16", "--max-model-len": 1024}
        where = {"--host": "127.0.0.1", "--port": self.port}
        flags = ["--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
        args = [str(item) for pair in (options | where).items() for item in pair]
        self._child = Child(
            "vllm server",
            [
                python,
                "-m",
                "vllm.entrypoints.openai.api_server",
                *args,
                *flags,
                *(["--enforce-eager"] if eager else []),
            ],
            environment(vllm_environment(python, threads)),
        )

    def __enter__(self) -> VllmServer:
        try:
            self.go_on()
        except BaseException:
            self._child.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.close()

    def version(self) -> str:
        """As the server says it, and how it runs."""
        answer = httpx.get(f"http://127.0.0.1:{self.port}/version", timeout=10).raise_for_status().json()
        return f"vllm server {answer['version']}, {self._mode}"

    def go_on(self) -> None:
        self._child.go_on()
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            self._child.check()
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise self._child.failure("not ready in time")

    def hold(self) -> None:
        self._child.hold()


def measure_server(server: HttpServer, work: Work) -> tuple[float, float]:
    """One round of one server: seconds for all streams at once, and seconds to the first token of one alone."""
    server.go_on()
    try:
        # Untimed: what was held still has cold caches and sleeping threads.
        run_streams(server, [work.prompts[work.single]] * 2, 2)
        seconds, _ = run_streams(server, work.prompts, work.new_tokens)
        firsts = sorted(run_streams(server, [work.prompts[work.single]], 1)[1][0] for _ in range(2 * work.repeats + 1))
        return seconds, firsts[len(firsts) // 2]
    finally:
        server.hold()


def measure_servers(
    servers: dict[str, HttpServer], work: Work, runs: int, said: Callable[[str], None]
) -> dict[str, list[tuple[float, float]]]:
    """Rounds of all servers, in turns; each sees the streams once before."""
    for server in servers.values():
        server.hold()
    for server in servers.values():
        measure_server(server, work)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for number in range(runs):
        said(f"HTTP, round {number + 1} of {runs}")
        for name in sorted(servers, reverse=number % 2 == 1):
            rounds[name].append(measure_server(servers[name], work))
    return rounds
