"""Spans of a gateway: one tree for each request, nothing of what was said in it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import pytest

from gateway.main import EXIT_SETTINGS, run
from shared.settings import GatewaySettings
from shared.trace_context import trace_id
from tests.integration.gateway_harness import Gateway, chat, completion, events, serve
from tests.support.otlp import Collector, Spanned, until_given_up
from tests.support.ports import free_port

ID, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{ID}-{SPAN}-01", "tracestate": "vendor=7"}
SECRET = "unmistakable words"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        yield collector


async def spans(collector: Collector, trace: str, *names: str) -> dict[str, Spanned]:
    return {span.name: span for span in await asyncio.to_thread(collector.trace, trace, *names)}


async def answered(gateway: Gateway, path: str, body: dict[str, object], **headers: str) -> str:
    """Have a request served by a worker that answers `a`, `b`; the trace context of its job."""
    asked = asyncio.create_task(gateway.http.post(path, json=body, headers=headers))
    running = await gateway.worker.pull()
    await running.answer("a", "b")
    assert (await asked).status_code == 200
    return running.job.envelope.trace["traceparent"]


async def test_a_stream_is_one_tree(valkey_url: str, collector: Collector) -> None:
    async with serve(valkey_url) as gateway:
        await gateway.http.get("/ready")
        sent_on = await answered(gateway, "/v1/chat/completions", chat(SECRET, stream=True), **PARENT)
        route = "POST /v1/chat/completions"
        found = await spans(collector, ID, route, "prepare", "submit tiny", "stream")
    server, submit, stream = found[route], found["submit tiny"], found["stream"]
    assert (server.parent, server.kind, server.service) == (SPAN, "server", "ropeway-gateway")
    assert {span.parent for span in (found["prepare"], submit, stream)} == {server.id}
    assert sent_on.split("-")[1:3] == [ID, submit.id] and submit.kind == "producer"
    assert server.attributes["http.route"] == server.attributes["url.path"] == "/v1/chat/completions"
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["ropeway.job.id"] == submit.attributes["messaging.message.id"]
    assert stream.attributes["ropeway.stream.frames"] == 4 and stream.attributes["ropeway.stream.bytes"] > 100
    assert stream.attributes["ropeway.job.status"] == "completed"
    assert stream.began <= stream.ended <= server.ended
    assert found["prepare"].attributes["ropeway.prompt_tokens"] > 0
    assert {span.trace for span in collector.spans} == {ID}, "a probe is no trace"
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_what_is_not_to_be_recorded_is_not(valkey_url: str, collector: Collector) -> None:
    async with serve(valkey_url) as gateway:
        unsampled = {"traceparent": f"00-{ID}-{SPAN}-00"}
        sent_on = await answered(gateway, "/v1/completions", completion(), **unsampled)
        assert sent_on.startswith(f"00-{ID}-") and sent_on.endswith("00")
        await answered(gateway, "/v1/completions", completion(), **PARENT)
        found = await spans(collector, ID, "POST /v1/completions", "answer")
    assert found["answer"].parent == found["POST /v1/completions"].id
    assert [span.name for span in collector.spans].count("answer") == 1


async def test_without_a_parent_a_request_begins_a_trace(valkey_url: str, collector: Collector) -> None:
    async with serve(valkey_url) as gateway:
        trace = trace_id({"traceparent": await answered(gateway, "/v1/completions", completion())})
        assert trace is not None
        found = await spans(collector, trace, "POST /v1/completions")
        exported = await gateway.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert found["POST /v1/completions"].parent == ""
    assert f'# {{trace_id="{trace}"}}' in exported.text


async def test_whoever_reads_a_job_is_linked_to_whoever_submitted_it(valkey_url: str, collector: Collector) -> None:
    async with serve(valkey_url) as gateway:
        order = {"kind": "completion", "body": completion()}
        job = (await gateway.http.post("/v1/jobs", json=order, headers=PARENT)).json()["id"]
        running = await gateway.worker.pull()
        await running.answer("a", "b")
        reader = "1" * 32
        headers = {"traceparent": f"00-{reader}-{SPAN}-01", "last-event-id": "1"}
        token = (await gateway.http.post(f"/v1/jobs/{job}/token")).json()["token"]
        response = await gateway.http.get(f"/v1/jobs/{job}/events?token={token}", headers=headers)
        assert response.status_code == 200
        found = await spans(collector, reader, "stream", "GET /v1/jobs/{job_id}/events")
        submitted = await spans(collector, ID, "submit tiny")
    stream = found["stream"]
    assert stream.links == [(ID, submitted["submit tiny"].id)]
    assert stream.attributes["ropeway.stream.frames"] == 3 and stream.attributes["ropeway.stream.log_reads"] >= 1
    assert not any(token.encode() in body for body in collector.bodies), "a token of a stream is a secret"


async def test_a_client_that_goes_is_said_to_have_gone(valkey_url: str, collector: Collector) -> None:
    async with serve(valkey_url) as gateway:
        body = completion(stream=True)
        async with gateway.http.stream("POST", "/v1/completions", json=body, headers=PARENT) as response:
            running = await gateway.worker.pull()
            await running.start()
            await running.say("a")
            async for _ in events(response):
                break
        found = await spans(collector, ID, "stream", "POST /v1/completions")
        await gateway.services.submitter.idle()
        await running.finish("abort", status="cancelled")
    assert found["stream"].attributes["ropeway.client.gone"] is True
    assert not found["stream"].failed and not found["POST /v1/completions"].failed


async def test_refusals_and_failures(valkey_url: str, collector: Collector) -> None:
    async with serve(valkey_url) as gateway:
        refused = await gateway.http.post("/v1/completions", json=completion(max_tokens=-1), headers=PARENT)
        assert refused.status_code == 400
        first = await spans(collector, ID, "POST /v1/completions")
        missing = "2" * 32
        headers = {"traceparent": f"00-{missing}-{SPAN}-01"}
        other = {**completion(), "model": "none"}
        assert (await gateway.http.post("/v1/completions", json=other, headers=headers)).status_code == 404
        second = await spans(collector, missing, "prepare", "POST /v1/completions")
    assert first["POST /v1/completions"].attributes["http.response.status_code"] == 400
    assert not first["POST /v1/completions"].failed, "the client's fault is no failure of a server"
    assert second["prepare"].failed and second["prepare"].attributes["error.type"] == "ModelNotFoundError"


async def test_a_collector_that_is_dead_is_not_waited_for(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with serve(valkey_url, otlp_traces_endpoint=f"http://127.0.0.1:{free_port()}") as gateway:
        for _ in range(3):
            assert (await answered(gateway, "/v1/completions", completion())).startswith("00-")
        ending = time.monotonic()
    assert time.monotonic() - ending < 25, "by itself the SDK waits for 30 s"
    await asyncio.to_thread(until_given_up)


async def test_without_the_extra_all_works(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    async with serve(valkey_url) as gateway:
        assert not gateway.services.tracing.on
        sent_on = await answered(gateway, "/v1/completions", completion(), **PARENT)
        assert sent_on == PARENT["traceparent"], "the client's context goes on to whoever makes traces"


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setattr("shared.logs.configure", lambda *_: None)  # of this whole process
    with pytest.raises(SystemExit) as ended:
        run(GatewaySettings(otlp_traces_endpoint="http://127.0.0.1:1", port=0))
    assert ended.value.code == EXIT_SETTINGS
