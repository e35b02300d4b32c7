"""The jobs API: submit, look, wait, follow from any place, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.keys import JobId
from shared.protocol import ErrorInfo
from tests.integration.gateway_harness import Event, Gateway, chat, completion, events, running, serve
from tests.unit.gateway import support


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with serve(redis_url) as g:
        yield g


async def submit(gateway: Gateway, **more: Any) -> str:
    response = await gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat(), **more})
    assert response.status_code == 202, response.text
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    return str(response.json()["id"])


async def follow(gateway: Gateway, job_id: str, after: int | None = None, most: int | None = None) -> list[Event]:
    """Events behind a number, up to the last or so many."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    got = []
    async with gateway.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for event in events(response):
            got.append(event)
            if len(got) == most:
                break
    return got


async def test_a_job_from_submit_to_result(gateway: Gateway) -> None:
    job_id = await submit(gateway, metadata={"order": "7"}, **{"class": "high"}, deadline_s=60)
    view = (await gateway.http.get(f"/v1/jobs/{job_id}")).json()
    assert (view["object"], view["status"], view["kind"], view["model"]) == ("job", "queued", "chat", support.MODEL)
    assert (view["class"], view["metadata"], view["result"], view["started_at"]) == ("high", {"order": "7"}, None, None)
    assert view["deadline_at"] - view["created_at"] in (60, 61)
    waiting = asyncio.create_task(gateway.http.get(f"/v1/jobs/{job_id}", params={"wait": "20"}))
    job = await gateway.worker.pull()
    assert job.id == job_id
    await job.answer("Hel", "lo")
    done = (await waiting).json()
    assert done["status"] == "completed"
    assert done["result"]["id"] == f"chatcmpl-{job_id}"
    assert done["result"]["choices"][0]["message"]["content"] == "Hello"
    assert done["result"]["choices"][0]["finish_reason"] == "stop"
    assert done["usage"]["completion_tokens"] == done["result"]["usage"]["completion_tokens"] == 2
    assert done["timings"]["queue_ms"] == 1.5
    assert done["finished_at"] >= done["started_at"] >= done["created_at"]
    assert done["error"] is None
    assert done["attempts"] == 1


async def test_a_wait_ends_in_time(valkey_url: str) -> None:
    async with serve(valkey_url, max_wait_s=0.1) as gateway:
        job_id = await submit(gateway)
        response = await gateway.http.get(f"/v1/jobs/{job_id}", params={"wait": "1000"})
        assert response.json()["status"] == "queued"
        for bad in ("-1", "NaN", "inf", "soon"):
            response = await gateway.http.get(f"/v1/jobs/{job_id}", params={"wait": bad})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "wait"
            assert "soon" not in response.text


async def test_a_failed_job_has_an_error_and_what_was_published(gateway: Gateway) -> None:
    job_id = await submit(gateway)
    job = await gateway.worker.pull()
    await job.say("half")
    await job.finish("error", status="failed", error=ErrorInfo(message="secret", code="engine_error"))
    view = (await gateway.http.get(f"/v1/jobs/{job_id}")).json()
    assert view["status"] == "failed"
    assert view["error"]["code"] == "engine_error"
    assert view["result"]["choices"][0]["message"]["content"] == "half"
    assert "secret" not in str(view)
    last = (await follow(gateway, job_id))[-1].data
    assert (last["kind"], last["status"], last["error"]["code"]) == ("error", "failed", "engine_error")
    assert "secret" not in str(last)


async def test_cancel(gateway: Gateway) -> None:
    queued = await submit(gateway)
    response = await gateway.http.post(f"/v1/jobs/{queued}/cancel")
    assert response.status_code == 200
    assert response.json()["status"] == "cancelled"
    assert (await gateway.http.post(f"/v1/jobs/{queued}/cancel")).json()["status"] == "cancelled"
    running_id = await submit(gateway)
    job = await gateway.worker.pull()
    assert job.id == running_id
    view = (await gateway.http.post(f"/v1/jobs/{running_id}/cancel")).json()
    assert (view["status"], view["cancel_requested"]) == ("running", True)
    await job.finish("stop")
    assert (await gateway.http.post(f"/v1/jobs/{running_id}/cancel")).json()["status"] == "completed"
    view = (await gateway.http.get(f"/v1/jobs/{queued}")).json()
    assert view["result"]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    "job_id", [str(JobId.new("tiny", 0)), "nonsense", "tiny.0.x", "..%2f..", "tiny.999." + "0" * 32]
)
async def test_unknown_jobs_are_a_404(gateway: Gateway, job_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
        response = await gateway.http.request(method, f"/v1/jobs/{job_id}{path}")
        assert response.status_code == 404, path
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_events_have_the_documented_shape(gateway: Gateway) -> None:
    job_id = await submit(gateway)
    job = await gateway.worker.pull()
    await job.answer("Hel", "lo")
    got = await follow(gateway, job_id)
    assert [e.id for e in got] == [1, 2, 3, 4] == [e.data["seq"] for e in got]
    assert [e.data["kind"] for e in got] == ["started", "tokens", "tokens", "done"]
    assert got[2].data["choices"] == [{"index": 0, "offset": 1, "text": "lo", "token_ids": [7], "finish_reason": None}]
    assert got[3].data["status"] == "completed"
    assert got[3].data["usage"]["completion_tokens"] == 2
    assert got[3].data["choices"][0]["finish_reason"] == "stop"


async def test_events_go_on_after_any_number(gateway: Gateway) -> None:
    job_id = await submit(gateway)
    job = await gateway.worker.pull()
    for i in range(20):
        await job.say(f"{i} ")
    first = await follow(gateway, job_id, most=5)
    second_reader = asyncio.create_task(follow(gateway, job_id, after=first[-1].id))
    third_reader = asyncio.create_task(follow(gateway, job_id))
    async with asyncio.timeout(10):
        while gateway.services.hub.streams != 2:
            await asyncio.sleep(0.005)
    for i in range(20, 40):
        await job.say(f"{i} ")
    await job.finish("length")
    whole = await third_reader
    assert first + await second_reader == whole
    assert [e.id for e in whole] == list(range(1, 42))
    text = "".join(c["text"] for e in whole for c in e.data["choices"])
    assert text == "".join(f"{i} " for i in range(40))
    for after in range(41):
        assert await follow(gateway, job_id, after=after) == whole[after:]
    response = await gateway.http.get(f"/v1/jobs/{job_id}/events?after=39")
    assert response.text.count("id: ") == 2
    response = await gateway.http.get(f"/v1/jobs/{job_id}/events?after=3", headers={"Last-Event-ID": "40"})
    assert response.text.count("id: ") == 1  # the header is the newer of the two


async def test_events_on_another_gateway_after_the_first_is_gone(gateway: Gateway) -> None:
    job_id = await submit(gateway)
    job = await gateway.worker.pull()
    await job.say("a")
    first = await follow(gateway, job_id, most=1)
    async with running(gateway.redis_url) as (url, _), gateway.http.__class__(base_url=url) as http:
        other = Gateway(url, http, gateway.services, gateway.worker, gateway.redis_url)
        reader = asyncio.create_task(follow(other, job_id, after=first[-1].id))
        await job.say("b")
        await job.finish("stop")
        assert [e.id for e in first + await reader] == [1, 2, 3]


async def test_a_chat_stream_is_resumed_through_events(gateway: Gateway) -> None:
    """The ids of a chat stream are good for `/events` of its job."""
    got: list[Event] = []
    request = {**chat(stream=True, background=True)}
    job = None
    opened = asyncio.create_task(
        gateway.http.send(gateway.http.build_request("POST", "/v1/chat/completions", json=request), stream=True)
    )
    job = await gateway.worker.pull()
    await job.say("one ")
    await job.say("two ")
    response = await opened
    async for event in events(response):
        got.append(event)
        if event.id == 2:
            break
    await response.aclose()
    await job.say("three")
    await job.finish("stop")
    rest = await follow(gateway, job.id, after=got[-1].id)
    seen = "".join(e.data["choices"][0]["delta"].get("content", "") for e in got)
    assert seen + "".join(c["text"] for e in rest for c in e.data["choices"]) == "one two three"


async def test_ends_of_the_log(gateway: Gateway) -> None:
    job_id = await submit(gateway)
    job = await gateway.worker.pull()
    await job.answer("x")
    url = f"/v1/jobs/{job_id}/events"
    assert (await gateway.http.get(url, headers={"Last-Event-ID": "3"})).status_code == 204
    for bad in ("4", "-1", "x", "1.5", "1" * 40, "٣".encode().decode("latin-1")):
        response = await gateway.http.get(url, headers={"Last-Event-ID": bad.encode("latin-1")})
        assert response.status_code == 400, bad
    assert (await gateway.http.get(f"{url}?after=-1")).json()["error"]["param"] == "after"
    from shared import keys
    from tests.support.redis_topology import raw_client

    client = await raw_client(gateway.redis_url)
    await client.delete(keys.events(JobId.parse(job_id)))
    await client.aclose()
    response = await gateway.http.get(url)
    assert response.status_code == 410
    assert response.json()["error"]["code"] == "events_expired"


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({"kind": "chat", "body": {}}, "body.model"),
        ({"kind": "chat", "body": chat(temperature=-1)}, "body.temperature"),
        ({"kind": "chat", "body": chat(tools=[{}])}, "body.tools"),
        ({"kind": "completion", "body": completion(["a", "b"])}, "body.prompt"),
        ({"kind": "completion", "body": completion(echo=True)}, "body.echo"),
        ({"kind": "completion", "body": completion([1] * 600)}, "body.prompt"),
        ({"kind": "chat", "body": chat(max_tokens=600)}, "body.max_tokens"),
        ({"kind": "chat", "body": "x"}, "body"),
        ({"body": chat()}, "kind"),
        ({"kind": "chat", "body": chat(), "metadata": {"a" * 65: "b"}}, "metadata"),
    ],
)
async def test_bad_jobs_are_refused_and_not_queued(gateway: Gateway, order: dict[str, Any], param: str) -> None:
    response = await gateway.http.post("/v1/jobs", json=order)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert await gateway.worker.queued() == 0


async def test_how_long_tokens_may_be_gathered(gateway: Gateway) -> None:
    gathers = gateway.services.settings.flush_ms
    for more, body, expected in (
        ({}, {}, 0),
        ({}, {"stream": True}, 0),
        ({}, {"stream": False}, gathers),
        ({"class": "batch"}, {}, gathers),
    ):
        await submit(gateway, body=chat(**body), **more)
        assert (await gateway.worker.pull()).job.envelope.flush_ms == expected


async def test_the_same_client_id_twice_is_two_jobs(gateway: Gateway) -> None:
    headers = {"X-Request-Id": "mine"}
    answers = await asyncio.gather(
        *(gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat()}, headers=headers) for _ in range(2))
    )
    assert [a.headers["x-request-id"] for a in answers] == ["mine", "mine"]
    ids = {a.json()["id"] for a in answers}
    assert len(ids) == 2
    assert all("mine" not in job_id for job_id in ids)
    assert (await gateway.http.get(f"/v1/jobs/{ids.pop()}")).json()["request_id"] == "mine"
