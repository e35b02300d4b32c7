"""The Responses API over HTTP: whole, streamed, in the background, taken up again, gone on with, cancelled, deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.errors import JobNotFoundError
from shared.protocol import ErrorInfo
from tests.integration.gateway_harness import Gateway, Running, serve
from tests.support.logged import logged
from tests.support.redis_topology import raw_client
from tests.unit.gateway import support


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with serve(redis_url) as g:
        yield g


def body(text: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": support.MODEL, "input": text, **more}


def events_of(text: str) -> list[dict[str, Any]]:
    """Events of a stream, each with a name that is its type."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            events.append(json.loads(lines["data"]))
            assert events[-1]["type"] == lines["event"]
    return events


async def create(g: Gateway, *texts: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """A whole response with this answer."""
    call = asyncio.create_task(g.http.post("/v1/responses", json=body(**more)))
    await (await g.worker.pull()).answer(*texts, finish=finish)
    response = await call
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def stream(g: Gateway, play: Any, **more: Any) -> list[dict[str, Any]]:
    call = asyncio.create_task(g.http.post("/v1/responses", json=body(stream=True, **more)))
    await play(await g.worker.pull())
    response = await call
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def hello(job: Running) -> None:
    await job.answer("Hel", "lo")


async def test_a_whole_response(gateway: Gateway) -> None:
    got = await create(gateway, "Hel", "lo", instructions="Be brief.", temperature=0.5, top_p=0.9, metadata={"a": "b"})
    assert got["id"].startswith("resp_tiny.0.")
    assert (got["object"], got["status"], got["error"], got["incomplete_details"]) == (
        "response",
        "completed",
        None,
        None,
    )
    assert (got["instructions"], got["temperature"], got["top_p"], got["metadata"]) == (
        "Be brief.",
        0.5,
        0.9,
        {"a": "b"},
    )
    assert (got["store"], got["background"], got["previous_response_id"]) == (True, False, None)
    item = got["output"][0]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    usage = got["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["output_tokens"] == 2
    assert usage["input_tokens_details"] == {"cached_tokens": 1, "cache_write_tokens": 0}
    later = (await gateway.http.get(f"/v1/responses/{got['id']}")).json()
    assert later | {"completed_at": 0} == got | {"completed_at": 0}
    assert later["completed_at"] - got["completed_at"] in (-1, 0, 1)


async def test_the_prompt_is_that_of_the_chat(gateway: Gateway) -> None:
    encoder = (await gateway.services.catalogue.find(support.MODEL)).encoder
    items = [
        {"role": "developer", "content": "one"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "three"}, {"type": "text", "text": "four"}]},
    ]
    call = asyncio.create_task(gateway.http.post("/v1/responses", json=body(items, instructions="zero", seed=7)))
    job = await gateway.worker.pull()
    prompt = encoder.decode(job.job.envelope.prompt_token_ids)
    places = [prompt.index(word) for word in ("zero", "one", "two", "three\nfour")]
    assert places == sorted(places)
    assert job.job.envelope.sampling.seed == 7
    await job.answer("x")
    assert (await call).status_code == 200


async def test_events_of_a_stream(gateway: Gateway) -> None:
    events = await stream(gateway, hello)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e["delta"] for e in events if e["type"].endswith("text.delta")] == ["Hel", "lo"]
    assert events[6]["text"] == events[7]["part"]["text"] == events[8]["item"]["content"][0]["text"] == "Hello"
    item_id = events[2]["item"]["id"]
    assert {e["item_id"] for e in events if "item_id" in e} == {item_id} == {events[8]["item"]["id"]}
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert (final["status"], final["usage"]["output_tokens"]) == ("completed", 2)
    assert final["output"][0]["content"][0]["text"] == "Hello"


async def test_what_is_cut_is_incomplete(gateway: Gateway) -> None:
    got = await create(gateway, "x", finish="length", max_output_tokens=1)
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert got["output"][0]["status"] == "incomplete"
    events = await stream(gateway, lambda job: job.answer("x", finish="length"))
    assert events[-1]["type"] == "response.incomplete"
    assert (await gateway.http.get(f"/v1/responses/{got['id']}")).json()["status"] == "incomplete"


async def test_a_stream_that_fails(gateway: Gateway) -> None:
    async def fail(job: Running) -> None:
        await job.say("half")
        await job.finish("error", status="failed", error=ErrorInfo(message="secret", code="engine_error"))

    events = await stream(gateway, fail)
    final = events[-1]["response"]
    assert (events[-1]["type"], final["status"], final["error"]["code"]) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert final["output"][0]["content"][0]["text"] == "half"
    assert "secret" not in str(events)
    later = (await gateway.http.get(f"/v1/responses/{final['id']}")).json()
    assert (later["status"], later["error"]["code"]) == ("failed", "server_error")
    again = events_of((await gateway.http.get(f"/v1/responses/{final['id']}?stream=true")).text)
    assert [e["type"] for e in again] == [e["type"] for e in events]


async def test_a_whole_response_that_fails_has_a_status(gateway: Gateway) -> None:
    call = asyncio.create_task(gateway.http.post("/v1/responses", json=body()))
    job = await gateway.worker.pull()
    await job.finish("error", status="failed", error=ErrorInfo(message="secret", code="engine_error"))
    assert (await call).status_code == 500


async def test_an_answer_without_text(gateway: Gateway) -> None:
    events = await stream(gateway, lambda job: job.finish("stop"))
    assert [e["type"] for e in events][2:4] == ["response.output_item.added", "response.content_part.added"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_in_the_background(gateway: Gateway) -> None:
    made = (await gateway.http.post("/v1/responses", json=body(background=True))).json()
    assert (made["status"], made["background"], made["output"], made["usage"]) == ("queued", True, [], None)
    url = f"/v1/responses/{made['id']}"
    assert (await gateway.http.get(url)).json()["status"] == "queued"
    job = await gateway.worker.pull()
    await job.start()
    assert (await gateway.http.get(url)).json()["status"] == "in_progress"
    await job.say("there")
    await job.finish("stop")
    got = (await gateway.http.get(url)).json()
    assert (got["status"], got["output"][0]["content"][0]["text"]) == ("completed", "there")
    assert (await gateway.http.get(f"/v1/jobs/{made['id'].removeprefix('resp_')}")).json()["status"] == "completed"


async def test_a_background_stream_goes_on_without_its_reader_and_is_taken_up(gateway: Gateway) -> None:
    request = gateway.http.build_request("POST", "/v1/responses", json=body(background=True, stream=True))
    opened = asyncio.create_task(gateway.http.send(request, stream=True))
    job = await gateway.worker.pull()
    await job.start()
    await job.say("one ")
    response = await opened
    text = ""
    async for line in response.aiter_lines():
        text += line + "\n"
        if line == "" and "one " in text:
            break
    await response.aclose()
    first = events_of(text)
    url = f"/v1/responses/{first[0]['response']['id']}"
    reader = asyncio.create_task(gateway.http.get(f"{url}?stream=true&starting_after={first[-1]['sequence_number']}"))
    await job.say("two")
    await job.finish("stop")
    rest = events_of((await reader).text)
    assert [e["sequence_number"] for e in first + rest] == list(range(len(first + rest)))
    assert "".join(e["delta"] for e in first + rest if e["type"].endswith("text.delta")) == "one two"
    whole = events_of((await gateway.http.get(f"{url}?stream=true")).text)
    for after in range(len(whole)):
        again = events_of((await gateway.http.get(f"{url}?stream=true&starting_after={after}")).text)
        assert [e["sequence_number"] for e in again] == list(range(after + 1, len(whole)))
    deltas = [e for e in whole if e["type"] != "response.created" and "response" not in e]
    assert deltas == [e for e in first + rest if e["type"] != "response.created" and "response" not in e]


async def test_a_conversation_goes_on(gateway: Gateway) -> None:
    first = await create(gateway, "Four.", text="What is two and two?", instructions="Count well.")
    second = await create(gateway, "Six.", text="And two more?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    call = asyncio.create_task(
        gateway.http.post("/v1/responses", json=body("Again?", previous_response_id=second["id"]))
    )
    job = await gateway.worker.pull()
    encoder = (await gateway.services.catalogue.find(support.MODEL)).encoder
    prompt = encoder.decode(job.job.envelope.prompt_token_ids)
    said = ("What is two and two?", "Four.", "And two more?", "Six.", "Again?")
    assert [prompt.index(text) for text in said] == sorted(prompt.index(text) for text in said)
    assert "Count well." not in prompt
    await job.answer("x")
    third = (await call).json()
    items = (await gateway.http.get(f"/v1/responses/{third['id']}/input_items")).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["Again?"]
    # What came before is not needed any more.
    await gateway.http.delete(f"/v1/responses/{first['id']}")
    await create(gateway, "y", previous_response_id=second["id"])


@pytest.mark.parametrize("previous", ["resp_tiny.0." + "0" * 32, "nonsense", "resp_", "resp_../../x", "unfinished"])
async def test_a_previous_response_has_to_be_there(gateway: Gateway, previous: str) -> None:
    if previous == "unfinished":
        previous = (await gateway.http.post("/v1/responses", json=body(background=True))).json()["id"]
    response = await gateway.http.post("/v1/responses", json=body(previous_response_id=previous))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "previous_response_id"


async def test_what_is_not_to_be_stored_is_gone_once_it_was_answered(gateway: Gateway) -> None:
    got = await create(gateway, "secret", store=False)
    assert (got["store"], got["output"][0]["content"][0]["text"]) == (False, "secret")
    assert (await gateway.http.get(f"/v1/responses/{got['id']}")).status_code == 404
    events = await stream(gateway, hello, store=False)
    for response_id in (got["id"], events[0]["response"]["id"]):
        with pytest.raises(JobNotFoundError):
            async with asyncio.timeout(10):
                while True:
                    await gateway.store.status(response_id.removeprefix("resp_"))
                    await asyncio.sleep(0.01)
    assert (await gateway.http.get("/v1/jobs")).json()["data"] == []


async def test_cancel_and_delete(gateway: Gateway) -> None:
    made = (await gateway.http.post("/v1/responses", json=body(background=True))).json()
    url = f"/v1/responses/{made['id']}"
    assert (await gateway.http.post(f"{url}/cancel")).json()["status"] == "cancelled"
    assert (await gateway.http.post(f"{url}/cancel")).json()["status"] == "cancelled"
    events = events_of((await gateway.http.get(f"{url}?stream=true")).text)
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
    running = (await gateway.http.post("/v1/responses", json=body(background=True))).json()
    job = await gateway.worker.pull()
    assert (await gateway.http.delete(f"/v1/responses/{running['id']}")).status_code == 409
    await job.answer("x")
    for response_id in (made["id"], running["id"]):
        gone = await gateway.http.delete(f"/v1/responses/{response_id}")
        assert gone.json() == {"id": response_id, "object": "response", "deleted": True}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            response = await gateway.http.request(method, f"/v1/responses/{response_id}{path}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")


async def test_a_job_that_is_no_response_is_not_shown_as_one(gateway: Gateway) -> None:
    job = {"kind": "chat", "body": {"model": support.MODEL, "messages": [{"role": "user", "content": "x"}]}}
    job_id = (await gateway.http.post("/v1/jobs", json=job)).json()["id"]
    for name in (job_id, f"resp_{job_id}", "resp_x", "x"):
        assert (await gateway.http.get(f"/v1/responses/{name}")).status_code == 404


async def test_a_response_of_another_key_does_not_exist(redis_url: str) -> None:
    a, b = ({"Authorization": f"Bearer key-of-{who}"} for who in "ab")
    async with serve(redis_url, api_keys=["key-of-a", "key-of-b"]) as g:
        made = (await g.http.post("/v1/responses", json=body(background=True), headers=a)).json()
        await (await g.worker.pull()).answer("x")
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "?stream=true")):
            response = await g.http.request(method, f"/v1/responses/{made['id']}{path}", headers=b)
            assert response.status_code == 404, path
        more = body(previous_response_id=made["id"])
        assert (await g.http.post("/v1/responses", json=more, headers=b)).status_code == 400
        assert (await g.http.get(f"/v1/responses/{made['id']}", headers=a)).json()["status"] == "completed"


async def test_a_repeat_attaches(gateway: Gateway) -> None:
    headers = {"Idempotency-Key": "k"}
    first = await gateway.http.post("/v1/responses", json=body(background=True), headers=headers)
    await (await gateway.worker.pull()).answer("x")
    again = await gateway.http.post("/v1/responses", json=body(background=True), headers=headers)
    assert (again.json()["id"], again.json()["status"]) == (first.json()["id"], "completed")
    assert again.headers["idempotent-replayed"] == "true"


async def test_who_goes_away_cancels_but_for_the_background(gateway: Gateway) -> None:
    call = asyncio.create_task(gateway.http.post("/v1/responses", json=body()))
    job = await gateway.worker.pull()
    call.cancel()
    async with asyncio.timeout(10):
        while not (await gateway.store.get(job.id)).cancel_requested:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ""}, None),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**64}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"input": "x" * 100_000}, "input"),
        ({"instructions": 5}, "instructions"),
    ],
)
async def test_what_is_wrong_or_not_served_is_named(gateway: Gateway, more: dict[str, Any], param: str | None) -> None:
    for extra in ({}, {"stream": True}) if "background" not in more else ({},):
        request = body() | more | extra
        if param is None:  # an empty text is one
            call = asyncio.create_task(gateway.http.post("/v1/responses", json=request))
            await (await gateway.worker.pull()).answer("x")
            assert (await call).status_code == 200
            continue
        response = await gateway.http.post("/v1/responses", json=request)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert await gateway.worker.queued() == 0


async def test_what_asks_for_nothing_is_taken(gateway: Gateway) -> None:
    got = await create(
        gateway, "x", tools=[], tool_choice="auto", reasoning={"effort": None}, include=[], truncation="disabled",
        parallel_tool_calls=False, user="u", safety_identifier="s", prompt_cache_key="k", service_tier="flex",
        stream_options={"include_obfuscation": False}, whatever=[1],
    )  # fmt: skip
    assert (got["user"], got["safety_identifier"], got["prompt_cache_key"]) == ("u", "s", "k")
    assert (got["service_tier"], got["parallel_tool_calls"]) == ("flex", False)
    plain = body() | {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "background": True}
    assert (await gateway.http.post("/v1/responses", json=plain)).json()["text"] == {"format": {"type": "text"}}


async def test_no_text_of_a_response_is_in_a_log_nor_in_redis_where_it_is_not_to_be_stored(
    gateway: Gateway, capfd: pytest.CaptureFixture[str]
) -> None:
    for more in ({"store": False}, {"store": False, "instructions": "sesame rule"}):
        await create(gateway, "sesame answer", text="sesame prompt", metadata={"k": "v"}, **more)
    client = await raw_client(gateway.redis_url)
    seen = b""
    async for key in client.scan_iter("*"):
        seen += await client.dump(key) or b""
    await client.aclose()
    assert b"sesame" not in seen
    with logged("debug"):
        first = await create(gateway, "sesame answer", text="sesame prompt")
        await create(gateway, "sesame answer", text="sesame again", previous_response_id=first["id"])
        await gateway.http.post("/v1/responses", json=body("sesame", temperature="sesame"))
        await gateway.http.post("/tokenize", json={"prompt": "sesame", "model": "sesame"})
        await gateway.http.get("/v1/jobs?after=sesame&model=sesame&status=sesame")
    written = capfd.readouterr()
    assert "http.request" in written.out + written.err
    assert "sesame" not in written.out + written.err
