"""What surrounds the endpoints: errors everywhere in one form, limits, keys, ids, probes, metrics, logs."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared import logs
from shared.errors import ServiceUnavailableError
from tests.integration.gateway_harness import Gateway, chat, completion, serve
from tests.support.redis_server import RedisServer
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
    assert_error(await http.post(path, json=chat() | {"model": "no"}), 404, "not_found_error", "model_not_found")
    assert_error(await http.get("/v1/nothing"), 404, "not_found_error", "not_found")
    assert_error(await http.get("/nothing"), 404, "not_found_error", "not_found")
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
    assert_error(await http.post(path, content=b"[" * 4000), 400, "invalid_request_error")


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
                assert_error(response, 401, "authentication_error", "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
                assert "k-" not in response.text
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/nothing")).status_code == 401
        for path in ("/health", "/metrics", "/docs", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        one, two = ({"Authorization": f"Bearer k-{n}"} for n in ("one", "two"))
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


async def test_no_prompt_output_or_key_in_logs(
    valkey_url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs.configure("info", True)
    monkeypatch.setattr(logging.getLogger("httpx"), "disabled", True)  # the client's own log, in this process too
    try:
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
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    written = capfd.readouterr()
    assert "http.request" in written.err
    assert "sesame" not in written.err + written.out
