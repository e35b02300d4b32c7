"""The client against a scripted gateway; both faces are put through the same cases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from ropeway.client import APIError, AsyncClient, Client, Event, Job, _core

Handler = Callable[[httpx.Request], httpx.Response]
MODEL = "m"


class Bytes(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that is cut off by an error after its chunks, if one is given."""

    def __init__(self, *chunks: bytes, error: Exception | None = None) -> None:
        self._chunks, self._error = chunks, error

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk


class Face:
    """Calls the sync or the async client in the same way."""

    def __init__(self, kind: str, handler: Handler) -> None:
        self._kind, self._transport = kind, httpx.MockTransport(handler)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._kind == "sync":
            with Client("http://gateway", api_key="k", transport=self._transport) as client:
                return getattr(client, name)(*args, **kwargs)
        return asyncio.run(self._call(name, args, kwargs))

    def stream(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self._kind == "sync":
            with Client("http://gateway", api_key="k", transport=self._transport) as client:
                return list(getattr(client, name)(*args, **kwargs))
        return asyncio.run(self._stream(name, args, kwargs))

    async def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        async with AsyncClient("http://gateway", api_key="k", transport=self._transport) as client:
            return await getattr(client, name)(*args, **kwargs)

    async def _stream(self, name: str, args: Any, kwargs: Any) -> list[Any]:
        async with AsyncClient("http://gateway", api_key="k", transport=self._transport) as client:
            return [item async for item in getattr(client, name)(*args, **kwargs)]


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Callable[[Handler], Face]:
    return lambda handler: Face(request.param, handler)


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "_FIRST_DELAY_S", 0.0)


def error(status: int, message: str = "no", **fields: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "t", **fields}})


def frame(seq: int, kind: str = "tokens", text: str = "") -> bytes:
    data = {"seq": seq, "kind": kind, "choices": [{"index": 0, "text": text}, {"index": 1, "text": "other"}]}
    return f"id: {seq}\ndata: {json.dumps(data)}\n\n".encode()


def test_submit_sends_messages_and_options(face: Callable[[Handler], Face]) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(202, json={"id": "m.1.x", "status": "queued"})

    job = face(handler).call("submit", "hi", model=MODEL, job_class="batch", metadata={"a": "b"}, max_tokens=3)
    assert (job.id, job.status, job.ended) == ("m.1.x", "queued", False)
    assert seen[0].method == "POST" and seen[0].url.path == "/v1/jobs"
    assert seen[0].headers["authorization"] == "Bearer k"
    assert json.loads(seen[0].content) == {
        "kind": "chat",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        "class": "batch",
        "metadata": {"a": "b"},
    }


def test_submit_raw_is_a_completion(face: Callable[[Handler], Face]) -> None:
    bodies: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(202, json={"id": "j", "status": "queued"})

    face(handler).call("submit", "once upon", model=MODEL, raw=True, deadline_s=5.0)
    assert bodies == [{"kind": "completion", "body": {"model": MODEL, "prompt": "once upon"}, "deadline_s": 5.0}]


def test_refusals_carry_the_whole_error(face: Callable[[Handler], Face]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        response = error(429, "full", code="queue_full", param="p")
        response.headers["retry-after"] = "2"
        return response

    with pytest.raises(APIError) as caught:
        face(handler).call("get", "j")
    got = caught.value
    assert (got.status, got.message, got.type, got.code, got.param, got.retry_after) == (
        429, "full", "t", "queue_full", "p", 2.0,
    )  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"error": "text"}', b'{"detail": 1}'])
def test_an_error_of_another_shape_is_still_an_api_error(face: Callable[[Handler], Face], content: bytes) -> None:
    with pytest.raises(APIError, match="502"):
        face(lambda _: httpx.Response(502, content=content)).call("models")


def test_wait_asks_until_the_job_has_ended(face: Callable[[Handler], Face]) -> None:
    statuses = iter(["queued", "running", "completed"])
    waits: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        waits.append(float(request.url.params["wait"]))
        return httpx.Response(200, json={"id": "j", "status": next(statuses)})

    assert face(handler).call("wait", "j").status == "completed"
    assert len(waits) == 3 and all(wait > 0 for wait in waits)


def test_wait_gives_up_at_its_time_out(face: Callable[[Handler], Face]) -> None:
    with pytest.raises(TimeoutError, match="it is running"):
        face(lambda _: httpx.Response(200, json={"id": "j", "status": "running"})).call("wait", "j", timeout=0.0)


def test_ids_cannot_leave_their_path(face: Callable[[Handler], Face]) -> None:
    paths: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return httpx.Response(200, json={"id": "j", "status": "cancelled"})

    face(handler).call("cancel", "../x?y")
    assert paths == [b"/v1/jobs/..%2Fx%3Fy/cancel"]


def test_events_go_on_over_lost_connections_without_gap_or_repeat(face: Callable[[Handler], Face]) -> None:
    answers = iter(
        [
            httpx.Response(200, stream=Bytes(frame(1, "started"), frame(2, text="a"), error=httpx.ReadError("cut"))),
            error(503),
            # A gateway that repeats what was seen, and ends before the job does.
            httpx.Response(200, stream=Bytes(frame(2, text="a") + frame(3, text="b")[:-5])),
            httpx.Response(200, stream=Bytes(b": keepalive\n\n", frame(3, text="b"), b'data: {"error": {}}\n\n')),
            httpx.Response(200, stream=Bytes(frame(4, text="c") + frame(5, "done"), frame(6))),
        ]
    )
    ids: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        ids.append(request.headers.get("last-event-id"))
        return next(answers)

    events: list[Event] = face(handler).stream("events", "j")
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]
    assert "".join(event.text() for event in events) == "abc"
    assert [event.last for event in events] == [False] * 4 + [True]
    assert ids == [None, "2", "2", "2", "3"]


def test_texts_of_all_choices() -> None:
    choices = [{"index": 0, "message": {"content": "a"}}, {"index": 1, "text": "b"}]
    job = Job("j", "completed", {"result": {"choices": choices}})
    assert (job.texts, job.text) == (["a", "b"], "a")
    assert (Job("j", "queued", {}).texts, Job("j", "queued", {}).text) == ([], "")


def test_events_start_after_what_was_seen(face: Callable[[Handler], Face]) -> None:
    ids: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        ids.append(request.headers["last-event-id"])
        return httpx.Response(200, stream=Bytes(frame(8, "done")))

    assert [event.seq for event in face(handler).stream("events", "j", after=7)] == [8]
    assert ids == ["7"]


def test_events_of_an_unknown_job_are_not_tried_again(face: Callable[[Handler], Face]) -> None:
    calls: list[None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(None)
        return error(404)

    with pytest.raises(APIError):
        face(handler).stream("events", "j")
    assert len(calls) == 1


def test_patience_ends(face: Callable[[Handler], Face]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("down", request=request)

    with pytest.raises(httpx.ConnectError, match="down"):
        face(handler).stream("events", "j", patience_s=-1.0)


def test_chat_streams_to_its_end(face: Callable[[Handler], Face]) -> None:
    chunks = b'data: {"choices": [1]}\n\ndata: {"choices": [2]}\n\ndata: [DONE]\n\n'
    bodies: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, stream=Bytes(chunks))

    messages = [{"role": "user", "content": "hi"}]
    got = face(handler).stream("stream_chat", messages, model=MODEL, temperature=0)
    assert [chunk["choices"] for chunk in got] == [[1], [2]]
    assert bodies == [{"model": MODEL, "messages": messages, "stream": True, "temperature": 0}]


def test_chat_tells_an_error_in_mid_stream_and_a_cut_one(face: Callable[[Handler], Face]) -> None:
    failed = Bytes(b'data: {"choices": []}\n\ndata: {"error": {"message": "gone", "code": "c"}}\n\ndata: [DONE]\n\n')
    with pytest.raises(APIError, match="gone") as caught:
        face(lambda _: httpx.Response(200, stream=failed)).stream("stream_chat", [], model=MODEL)
    assert caught.value.code == "c"
    with pytest.raises(httpx.RemoteProtocolError):
        face(lambda _: httpx.Response(200, stream=Bytes(b"data: {}\n\n"))).stream("stream_chat", [], model=MODEL)


def test_models_and_chat(face: Callable[[Handler], Face]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]})
        return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})

    assert face(handler).call("models") == ["a", "b"]
    assert face(handler).call("chat", [], model="a")["choices"][0]["message"]["content"] == "yes"


def test_a_job_shows_text_and_error() -> None:
    chat = Job("j", "completed", {"result": {"choices": [{"message": {"content": "hi"}}]}})
    plain = Job("j", "completed", {"result": {"choices": [{"text": "hi"}]}})
    assert (chat.text, plain.text, Job("j", "queued", {"result": None}).text) == ("hi", "hi", "")
    failed = Job("j", "failed", {"error": {"message": "boom", "code": "engine_error"}})
    assert chat.error is None and failed.error is not None and failed.error.code == "engine_error"
