"""What surrounds the endpoints: errors everywhere in one form, limits, keys, ids, probes, metrics, logs."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from gateway import main
from shared.errors import ServiceUnavailableError
from shared.protocol import ErrorInfo
from shared.settings import GatewaySettings
from tests.integration.gateway_harness import Gateway, chat, completion, serve
from tests.support.logged import logged
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.redis_topology import raw_client
from tests.unit.gateway import support


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[Gateway]:
    async with serve(valkey_url, max_body_bytes=4096) as g:
        yield g


def assert_error(response: httpx.Response, status: int, kind: str, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error body, nothing else."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert error["code"] == code
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return error


async def test_errors_have_one_form(gateway: Gateway) -> None:
    http = gateway.http
    path = "/v1/chat/completions"
    assert_error(await http.post(path, content=b"{"), 400, "invalid_request_error")
    assert_error(await http.post(path, json={}), 400, "invalid_request_error")
    assert_error(await http.post(path, json=chat() | {"model": "no"}), 404, "invalid_request_error", "model_not_found")
    assert_error(await http.get("/v1/nothing"), 404, "invalid_request_error", "not_found")
    assert_error(await http.get("/nothing"), 404, "invalid_request_error", "not_found")
    assert_error(await http.get(path), 405, "invalid_request_error", "method_not_allowed")
    assert_error(await http.delete("/v1/models"), 405, "invalid_request_error", "method_not_allowed")
    error = assert_error(
        await http.post("/v1/completions", json=completion([5] * 512, max_tokens=1)),
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )
    assert "512" in error["message"]
    assert await gateway.worker.queued() == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (completion(""), "prompt"),
        (completion([]), "prompt"),
        (completion([[]]), "prompt"),
        (completion([[5, 7], [1e19]]), "prompt"),
        (completion([-1]), "prompt"),
        (completion([400]), "prompt"),
        (completion([5, "a"]), "prompt"),
        (completion(["a"] * 129), "prompt"),
        (completion(["a"] * 65, n=2), "n"),
        (completion("a", max_tokens=512), "max_tokens"),
        (completion("a", logit_bias={"999999": 1}), "logit_bias"),
        (completion("x" * 600 * 30), None),
    ],
)
async def test_nothing_malformed_reaches_the_queue(gateway: Gateway, body: dict[str, Any], param: str | None) -> None:
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.status_code == (413 if param is None else 400)
    assert response.json()["error"]["param"] == param
    assert await gateway.worker.queued() == 0
    assert gateway.services.metrics.registry.get_sample_value(
        "ropeway_gateway_jobs_total", {"model": support.MODEL, "outcome": "accepted"}
    ) is None  # fmt: skip


async def chunked(size: int) -> AsyncIterator[bytes]:
    """A body without a length."""
    for _ in range(size // 512):
        yield b" " * 512


async def test_bodies_are_capped(gateway: Gateway) -> None:
    http, path = gateway.http, "/v1/completions"
    big = json.dumps(completion("x" * 5000)).encode()
    assert_error(await http.post(path, content=big), 413, "invalid_request_error", "payload_too_large")
    assert_error(await http.post(path, content=chunked(8192)), 413, "invalid_request_error", "payload_too_large")
    assert_error(
        await http.post(path, content=gzip.compress(big), headers={"Content-Encoding": "gzip"}),
        415,
        "invalid_request_error",
        "unsupported_content_encoding",
    )
    assert await gateway.worker.queued() == 0


async def test_a_body_that_is_announced_too_large_is_not_waited_for(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n")
    async with asyncio.timeout(20):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


@pytest.mark.parametrize("line", [b"x" * 1000, b"X-Header: y\r\n" * 100])
async def test_heads_are_capped(gateway: Gateway, line: bytes) -> None:
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    writer.write(b"GET /health HTTP/1.1\r\nX-First: " + line * 1000)
    # It has no end, and yet the server does not wait for more.
    async with asyncio.timeout(20):
        with suppress(ConnectionError):
            await writer.drain()
            await reader.read()
    writer.close()


async def test_the_cap_is_on_each_head_and_not_on_a_connection(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    body = json.dumps(completion("x", n=0)).encode()
    lines = b"Host: x\r\nX: %b\r\nContent-Length: %d" % (b"y" * 30_000, len(body))
    for _ in range(5):
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + lines + b"\r\n\r\n" + body)
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400 ") and b"application/json" in answer
            await reader.readexactly(int(answer.lower().partition(b"content-length:")[2].split()[0]))
    writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/jobs"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "start",
    [b"[", b'{"a":', b'{"model":"tiny","prompt":[', b'{"model":"tiny","messages":[{"role":"user","content":[',
     b'{"kind":"chat","body":{"messages":['],
)  # fmt: skip
async def test_deep_bodies_are_a_400(gateway: Gateway, path: str, whole: bool, start: bytes) -> None:
    """As one piece or in chunks without a length, cut off or closed."""
    depth = 1900

    async def pieces() -> AsyncIterator[bytes]:
        yield start
        yield b"[" * depth
        yield b"]" * depth

    content = start + b"[" * depth if whole else pieces()
    assert_error(await gateway.http.post(path, content=content), 400, "invalid_request_error")
    assert await gateway.worker.queued() == 0


async def test_a_full_lane_is_a_429(valkey_url: str) -> None:
    async with serve(valkey_url, max_queued_jobs=2) as gateway:
        order = {"kind": "chat", "body": chat()}
        for _ in range(2):
            assert (await gateway.http.post("/v1/jobs", json=order)).status_code == 202
        for path, body in (
            ("/v1/jobs", order),
            ("/v1/chat/completions", chat()),
            ("/v1/chat/completions", chat(stream=True)),
        ):
            response = await gateway.http.post(path, json=body)
            assert_error(response, 429, "rate_limit_error", "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        assert await gateway.worker.queued() == 2
        assert gateway.services.hub.streams == 0


async def test_all_prompts_are_queued_or_none(valkey_url: str) -> None:
    async with serve(valkey_url, max_queued_jobs=2) as gateway:
        response = await gateway.http.post("/v1/completions", json=completion(["a", "b", "c"]))
        assert response.status_code == 429
        await gateway.services.submitter.idle()
        assert await gateway.worker.queued() == 0


async def test_too_many_streams_are_a_429(valkey_url: str) -> None:
    async with serve(valkey_url, max_live_streams=1) as gateway:
        first = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=chat()))
        job = await gateway.worker.pull()
        assert_error(
            await gateway.http.post("/v1/chat/completions", json=chat()), 429, "rate_limit_error", "too_many_streams"
        )
        await job.answer("x")
        assert (await first).status_code == 200


async def test_a_store_that_is_away_is_a_503(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*args: Any, **kwargs: Any) -> None:
        raise ServiceUnavailableError("Redis is not available", retry_after=1.0)

    monkeypatch.setattr(gateway.services.store, "submit", away)
    for body in (chat(), chat(stream=True)):
        response = await gateway.http.post("/v1/chat/completions", json=body)
        assert_error(response, 503, "service_unavailable_error", "service_unavailable")
        assert response.headers["retry-after"] == "1"


async def test_an_unforeseen_exception_is_a_500_with_an_id(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("the secret")

    monkeypatch.setattr(gateway.services.store, "submit", broken)
    response = await gateway.http.post("/v1/chat/completions", json=chat(), headers={"X-Request-Id": "bad id"})
    error = assert_error(response, 500, "server_error", "internal_error")
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in response.text


async def test_an_exception_in_mid_stream_is_generic(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.answers import Answer

    add = Answer.add
    calls = 0

    def broken(self: Answer, *args: Any, **kwargs: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ZeroDivisionError("the secret")
        return add(self, *args, **kwargs)

    monkeypatch.setattr(Answer, "add", broken)
    request = gateway.http.build_request("POST", "/v1/chat/completions", json=chat(stream=True))
    sent = asyncio.create_task(gateway.http.send(request, stream=True))
    job = await gateway.worker.pull()
    await job.say("a")
    response = await sent
    await job.say("b")
    text = (await response.aread()).decode()
    assert text.count("[DONE]") == 1
    assert text.count('"error":') == 1
    assert text.count('"finish_reason":"error"') == 1
    assert response.headers["x-request-id"] in text
    assert "secret" not in text
    async with asyncio.timeout(10):  # its job does not go on for nobody
        while not (await gateway.store.get(job.id)).cancel_requested:
            await asyncio.sleep(0.005)


async def test_api_keys(valkey_url: str) -> None:
    async with serve(valkey_url, api_keys=["k-one", "k-two"]) as gateway:
        http = gateway.http
        for path, body in (("/v1/chat/completions", chat()), ("/v1/jobs", {"kind": "chat", "body": chat()})):
            for headers in ({}, {"Authorization": "Bearer k-three"}, {"Authorization": "k-one"}):
                response = await http.post(path, json=body, headers=headers)
                assert_error(response, 401, "invalid_request_error", "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
                assert "k-" not in response.text
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/nothing")).status_code == 401
        assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200
        one, two = ({"Authorization": f"Bearer k-{n}"} for n in ("one", "two"))
        for path in ("/", "/metrics", "/docs", "/openapi.json", "/v1/pools"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=one)).status_code == 200
        job = (await http.post("/v1/jobs", json={"kind": "chat", "body": chat()}, headers=one)).json()["id"]
        assert (await http.get(f"/v1/jobs/{job}", headers=one)).status_code == 200
        for method, suffix in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
            assert (await http.request(method, f"/v1/jobs/{job}{suffix}", headers=two)).status_code == 404
        mine, theirs = await gateway.worker.pull(), None
        await http.post("/v1/jobs", json={"kind": "chat", "body": chat()}, headers=two)
        theirs = await gateway.worker.pull()
        assert mine.job.envelope.tenant != theirs.job.envelope.tenant
        assert mine.job.envelope.cache_salt != theirs.job.envelope.cache_salt
        assert "k-one" not in mine.job.envelope.tenant


@pytest.mark.parametrize("given", [None, "x" * 200, "a b", "é", ""])
async def test_request_ids(gateway: Gateway, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    ids = {(await gateway.http.get("/v1/models", headers=headers)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert given not in ids


@pytest.mark.parametrize("stream", [False, True])
async def test_one_client_id_at_the_same_time_is_two_answers(gateway: Gateway, stream: bool) -> None:
    """Header and field alike are echoed at most; jobs, channels and answers go by ids of our own."""
    sent = [
        asyncio.create_task(
            gateway.http.post(
                "/v1/chat/completions",
                json=chat(stream=stream, request_id="mine"),
                headers=[("X-Request-Id", "mine"), ("X-Request-Id", "another")],
            )
        )
        for _ in range(2)
    ]
    jobs = [await gateway.worker.pull() for _ in sent]
    assert len({job.id for job in jobs}) == 2
    for job in jobs:
        assert job.job.envelope.request_id == "mine"
        assert "mine" not in job.id
        await job.answer(f"for {job.id}")
    for response in await asyncio.gather(*sent):
        assert response.headers.get_list("x-request-id") == ["mine"]
        job_id = response.headers["x-ropeway-job-id"]
        assert f"for {job_id}" in response.text
        assert [job.id in response.text for job in jobs].count(True) == 1
    assert gateway.services.hub.streams == 0


async def test_probes(valkey_url: str) -> None:
    async with serve(valkey_url, card=False) as gateway:
        assert (await gateway.http.get("/health")).status_code == 200
        response = await gateway.http.get("/ready")
        assert response.status_code == 503
        assert response.json() == {"status": "unready", "redis": True, "models": []}
        assert (await gateway.http.get("/v1/models")).json()["data"] == []
        await gateway.store.put_card(support.card(), support.bundle())
        async with asyncio.timeout(10):
            while (await gateway.http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)


async def test_starts_and_answers_without_redis() -> None:
    server = RedisServer("valkey")
    try:
        async with serve(server.url, card=False) as gateway:
            assert (await gateway.http.get("/health")).status_code == 200
            response = await gateway.http.get("/ready")
            assert response.status_code == 503
            assert response.json()["redis"] is False
            response = await gateway.http.post("/v1/chat/completions", json=chat())
            assert_error(response, 503, "service_unavailable_error", "service_unavailable")
            server.start()
            await gateway.store.put_card(support.card(), support.bundle())
            async with asyncio.timeout(20):
                while (await gateway.http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
    finally:
        server.close()


async def test_metrics_tell_what_happened(gateway: Gateway) -> None:
    asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=chat(stream=True)))
    await (await gateway.worker.pull()).answer("a", "b")
    await asked
    await gateway.http.get("/v1/who/knows")
    text = (await gateway.http.get("/metrics")).text
    for line in (
        'ropeway_http_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0',
        'ropeway_http_requests_total{method="GET",route="unmatched",status="404"} 1.0',
        'ropeway_gateway_generation_tokens_total{model="tiny"} 2.0',
        'ropeway_gateway_time_to_first_token_seconds_count{model="tiny"} 1.0',
        'ropeway_gateway_queue_time_seconds_count{model="tiny"} 1.0',
        'ropeway_gateway_jobs_total{model="tiny",outcome="accepted"} 1.0',
        "ropeway_gateway_streams 0.0",
    ):
        assert line in text, line


async def test_the_document_holds_the_bodies(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {"ChatCompletionRequest", "CompletionRequest", "JobRequest", "Message"} <= set(schemas)
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}


@pytest.mark.parametrize(("log_level", "word"), [("info", "sesame"), ("debug", "sesame-")])
async def test_no_prompt_output_or_key_in_logs(
    valkey_url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log_level: str, word: str
) -> None:
    """At debug level no key, which are the words with a hyphen. Redis sees neither prompts nor keys."""
    with logged(log_level):
        async with serve(valkey_url, api_keys=["sesame-key"]) as gateway:
            headers = {"Authorization": "Bearer sesame-key"}
            for body in (chat("sesame prompt"), chat("sesame prompt", stream=True)):
                asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body, headers=headers))
                await (await gateway.worker.pull()).answer("sesame answer")
                assert "sesame answer" in (await asked).text
            for bad in ({"temperature": "sesame"}, {"logit_bias": {"sesame": 1}}):
                await gateway.http.post("/v1/chat/completions", json=chat("sesame", **bad), headers=headers)
            await gateway.http.post(
                "/v1/chat/completions", json=chat(), headers={"Authorization": "Bearer sesame-wrong"}
            )
            await gateway.http.get("/v1/models?q=sesame", headers=headers)
            async with gateway.http.stream(
                "GET", "/v1/jobs/sesame/events", headers=headers | {"Cookie": "sesame-cookie"}
            ) as response:
                assert response.status_code == 404
            await crash(gateway, chat("sesame prompt"), headers, monkeypatch)
            await fail(gateway, chat("sesame prompt", stop=["sesame stop"]), headers)
            stored = await everything(gateway)
    written = capfd.readouterr()
    for event in ("http.request", "request.internal_error", "job.failed"):
        assert event in written.err
    assert word not in written.err + written.out
    assert b"sesame answer" in stored
    assert b"sesame prompt" not in stored
    assert b"sesame-" not in stored


async def crash(gateway: Gateway, body: dict[str, Any], headers: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """A request whose handling raises what nobody foresaw."""

    async def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    with patch.context() as patched:
        patched.setattr(gateway.services.store, "submit", broken)
        assert (await gateway.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 500


async def fail(gateway: Gateway, body: dict[str, Any], headers: dict[str, str]) -> None:
    """A request that its worker fails after the first words."""
    asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body, headers=headers))
    job = await gateway.worker.pull()
    await job.say("sesame answer")
    await job.finish(None, status="failed", error=ErrorInfo(message="m", code="engine_error"))
    assert (await asked).status_code == 500


async def everything(gateway: Gateway) -> bytes:
    """All that Redis holds, keys and values."""
    client = await raw_client(gateway.redis_url)
    readers = {b"string": client.get, b"hash": client.hgetall, b"set": client.smembers, b"stream": client.xrange}
    found: list[Any] = []
    async for key in client.scan_iter("*"):
        kind = await client.type(key)
        found += [key, await readers[kind](key) if kind in readers else await client.zrange(key, 0, -1)]
    await client.aclose()
    return repr(found).encode()


async def test_an_idle_connection_outlives_those_of_clients_pools(valkey_url: str) -> None:
    """httpx lets a connection go after 5 s without use; a server that does so too breaks requests on their way."""
    port = free_port()
    server = main.server(GatewaySettings(redis_url=valkey_url, port=port))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for pause in (0.0, 6.0):
        await asyncio.sleep(pause)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await reader.read(1000)
    writer.close()
    server.should_exit = True
    await task
