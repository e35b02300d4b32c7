"""Answers from frames, without HTTP."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import pytest

from gateway.answers import Answer, Shape, from_result
from gateway.errors import error_of, public
from shared.errors import (
    AdapterError,
    EngineError,
    JobError,
    JobExpiredError,
    ProtocolError,
    RopewayError,
    ServiceUnavailableError,
)
from shared.protocol import (
    ChoiceFrame,
    ChoiceResult,
    ErrorInfo,
    FinishReason,
    Frame,
    FrameKind,
    Result,
    TokenLogprob,
    TopLogprob,
    Usage,
)

JOB = "tiny.0." + "a" * 32


def shape(kind: Literal["chat", "completion"] = "completion", **more: Any) -> Shape:
    return Shape(**({"kind": kind, "model": "m", "job_ids": [JOB], "n": 1, "created": 5} | more))


def frame(seq: int, *choices: ChoiceFrame, kind: FrameKind = "tokens", **more: Any) -> Frame:
    return Frame(v=1, seq=seq, epoch=1, kind=kind, choices=list(choices), **more)


def part(text: str, offset: int, *, finish: FinishReason | None = None, index: int = 0) -> ChoiceFrame:
    return ChoiceFrame(index=index, offset=offset, ids=[7], text=text, finish=finish)


def chunks(data: bytes) -> list[tuple[int | None, Any]]:
    """Number and content of each event."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((int(lines["id"]) if "id" in lines else None, json.loads(lines["data"])))
    return found


def test_the_number_is_on_the_last_event_of_a_frame() -> None:
    answer = Answer(shape(n=3), whole=False)
    data = answer.add(0, frame(9, *(part("x", 0, index=i) for i in range(3))), chunks=True)
    assert [number for number, _ in chunks(data)] == [None, None, 9]
    assert [c["choices"][0]["index"] for _, c in chunks(data)] == [0, 1, 2]


@pytest.mark.parametrize("offset", [0, 2, 5])
def test_tokens_that_come_twice_or_are_missing_are_an_error(offset: int) -> None:
    answer = Answer(shape(), whole=False)
    answer.add(0, frame(1, part("a", 0)), chunks=True)
    with pytest.raises(ProtocolError):
        answer.add(0, frame(2, part("b", offset)), chunks=True)


def test_a_choice_that_does_not_exist_is_an_error() -> None:
    for index in (1, -1):
        with pytest.raises(ProtocolError):
            Answer(shape(), whole=False).add(0, frame(1, part("a", 0, index=index)), chunks=True)


def test_nothing_follows_a_finish() -> None:
    answer = Answer(shape(), whole=True)
    answer.add(0, frame(1, part("a", 0, finish="stop")), chunks=True)
    assert answer.add(0, frame(2, part("b", 1, finish="length")), chunks=True) == b""
    whole = json.loads(answer.whole())
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("a", "stop")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_finish_is_the_same_whole_and_streamed(finish: FinishReason) -> None:
    streamed, whole = Answer(shape("chat"), whole=False), Answer(shape("chat"), whole=True)
    frames = [frame(1, part("a", 0)), frame(2, ChoiceFrame(offset=1, finish=finish), kind="done", status="completed")]
    data = b"".join(streamed.add(0, f, chunks=True) for f in frames)
    for f in frames:
        whole.add(0, f, chunks=False)
    assert chunks(data)[-1][1]["choices"][0]["finish_reason"] == finish
    assert json.loads(whole.whole())["choices"][0]["finish_reason"] == finish


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_entries_of_logprobs_are_as_many_as_tokens(kind: Any) -> None:
    entries = [
        TokenLogprob(id=i, logprob=-float(i), rank=1, token=t, top=[TopLogprob(id=9, logprob=-9.0, rank=2, token=b"q")])
        for i, t in enumerate((b"a", b"\xe2\x82", b"\xac", b"b"))
    ]
    answer = Answer(shape(kind, logprobs=1), whole=True)
    data = answer.add(0, frame(1, ChoiceFrame(ids=[1, 2], text="a", logprobs=entries[:2])), chunks=True)
    data += answer.add(0, frame(2, ChoiceFrame(offset=2, ids=[3, 4], text="€b", logprobs=entries[2:])), chunks=True)
    data += answer.add(
        0, frame(3, ChoiceFrame(offset=4, finish="stop"), kind="done", status="completed"), chunks=True
    )  # fmt: skip
    found = [c["choices"][0]["logprobs"] for _, c in chunks(data)]
    whole = json.loads(answer.whole())["choices"][0]["logprobs"]
    if kind == "chat":
        assert [len(f["content"]) for f in found[:2]] == [2, 2]
        assert bytes(b for e in whole["content"] for b in e["bytes"]) == "a€b".encode()
    else:
        assert [len(f["tokens"]) for f in found[:2]] == [2, 2]
        assert whole["text_offset"] == found[0]["text_offset"] + found[1]["text_offset"]
        assert all(set(top) == {token, "q"} for top, token in zip(whole["top_logprobs"], whole["tokens"], strict=True))
    assert found[2] is None


def prompt_entry(token_id: int, token: bytes) -> TokenLogprob:
    top = [TopLogprob(id=90 + i, logprob=-0.5 - i, rank=1 + i, token=b"q%d" % i) for i in range(3)]
    return TokenLogprob(id=token_id, logprob=-4.0, rank=9, token=token, top=top)


def test_prompts_log_probabilities_are_with_each_choice_of_their_prompt() -> None:
    answer = Answer(shape(job_ids=[JOB, JOB[:-1] + "b"], n=2, prompt_logprobs=1), whole=True)
    answer.add(0, frame(1, prompt_logprobs=[prompt_entry(5, b"a")]), chunks=False)
    answer.add(1, frame(1, prompt_logprobs=[prompt_entry(6, b"c")]), chunks=False)
    answer.add(0, frame(2, part("x", 0), part("y", 0, index=1), prompt_logprobs=[prompt_entry(7, b"b")]), chunks=False)
    assert answer.candidates == 3 * 4
    body = json.loads(answer.whole())
    assert "prompt_logprobs" not in body
    first, again, second, _ = (choice["prompt_logprobs"] for choice in body["choices"])
    likeliest = {"logprob": -0.5, "rank": 1, "decoded_token": "q0"}
    assert first == again
    assert first == [
        None,
        {"5": {"logprob": -4.0, "rank": 9, "decoded_token": "a"}, "90": likeliest},
        {"7": {"logprob": -4.0, "rank": 9, "decoded_token": "b"}, "90": likeliest},
    ]
    assert [list(each or ()) for each in second] == [[], ["6", "90"]]


def test_a_chats_prompt_is_told_of_once() -> None:
    answer = Answer(shape("chat", n=2, prompt_logprobs=0), whole=True)
    answer.add(0, frame(1, part("x", 0), prompt_logprobs=[prompt_entry(5, b"a")]), chunks=False)
    body = json.loads(answer.whole())
    assert body["prompt_logprobs"] == [None, {"5": {"logprob": -4.0, "rank": 9, "decoded_token": "a"}}]
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_nothing_is_said_of_a_prompt_where_nobody_asked(kind: Any) -> None:
    answer = Answer(shape(kind), whole=True)
    answer.add(0, frame(1, part("x", 0)), chunks=False)
    assert b"prompt_logprobs" not in answer.whole()


def test_an_echo_with_logprobs_has_the_prompts_tokens_in_front() -> None:
    asked = shape(logprobs=1, echo=["a b"], first=["a"], prompt_logprobs=None)
    answer = Answer(asked, whole=True)
    answer.add(0, frame(1, prompt_logprobs=[prompt_entry(5, b" b")]), chunks=False)
    own = TokenLogprob(
        id=7, logprob=-1.0, rank=1, token=b" c", top=[TopLogprob(id=7, logprob=-1.0, rank=1, token=b" c")]
    )
    answer.add(0, frame(2, ChoiceFrame(ids=[7], text=" c", logprobs=[own], finish="length")), chunks=False)
    (choice,) = json.loads(answer.whole())["choices"]
    assert choice["text"] == "a b c" and "prompt_logprobs" not in choice
    assert choice["logprobs"] == {
        "tokens": ["a", " b", " c"],
        "token_logprobs": [None, -4.0, -1.0],
        "top_logprobs": [None, {"q0": -0.5, " b": -4.0}, {" c": -1.0}],
        "text_offset": [0, 1, 3],
    }
    alone = Answer(dataclasses.replace(asked, echo_only=True), whole=True)
    alone.add(0, frame(1, prompt_logprobs=[prompt_entry(5, b" b")]), chunks=False)
    alone.add(0, frame(2, ChoiceFrame(ids=[7], text=" c", logprobs=[own], finish="length")), chunks=False)
    (choice,) = json.loads(alone.whole())["choices"]
    assert choice["text"] == "a b" and choice["logprobs"]["tokens"] == ["a", " b"]
    assert choice["finish_reason"] == "length"


def test_an_error_frame_keeps_its_text_and_closes_every_choice() -> None:
    answer = Answer(shape(n=2), whole=False)
    answer.add(0, frame(1, part("a", 0)), chunks=True)
    error = ErrorInfo(message="m", code="engine_error")
    last = frame(2, part("b", 1, finish="error"), kind="error", status="failed", error=error)
    with pytest.raises(EngineError) as caught:
        answer.add(0, last, chunks=True)
    data = answer.failure(public(caught.value, "ref")).removesuffix(b"data: [DONE]\n\n")
    got = [c for _, c in chunks(data)]
    assert [
        (c["choices"][0]["index"], c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in got[:-1]
    ] == [
        (0, "b", "error"),
        (1, "", "error"),
    ]
    assert got[-1]["error"]["code"] == "engine_error"


@pytest.mark.parametrize(
    ("info", "kind", "speaks"),
    [
        (ErrorInfo(message="secret", code="engine_error"), EngineError, False),
        (ErrorInfo(message="secret"), JobError, False),
        (ErrorInfo(message="secret", code="no_such_code", status=500), JobError, False),
        (ErrorInfo(message="secret", code="protocol_error"), ProtocolError, False),
        (ErrorInfo(message="late", code="deadline_exceeded", status=504), JobExpiredError, True),
        (ErrorInfo(message="away", code="service_unavailable", status=503), ServiceUnavailableError, True),
        (ErrorInfo(message="away", code="adapter_store_unavailable", status=503), ServiceUnavailableError, True),
        (ErrorInfo(message="broken", code="invalid_adapter", status=400), AdapterError, True),
        (ErrorInfo(message="bad", code=None, status=400, param="n"), RopewayError, True),
    ],
)
def test_internal_errors_of_jobs_are_generic(info: ErrorInfo, kind: type[RopewayError], speaks: bool) -> None:
    error = error_of(info, JOB)
    assert isinstance(error, kind)
    assert error.status == info.status
    assert (info.message in error.message) == speaks
    if not speaks:
        assert JOB in error.message
        assert "secret" not in public(error, "ref").message


def test_a_result_becomes_the_answer_of_its_endpoint() -> None:
    result = Result(
        id=JOB,
        status="completed",
        choices=[ChoiceResult(index=0, text="hi", token_ids=[1, 2], finish_reason="stop", stop_reason="x")],
        usage=Usage(prompt_tokens=3, completion_tokens=2),
    )
    chat = json.loads(from_result(shape("chat"), result))
    assert chat["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "x",
        }
    ]
    assert chat["usage"]["total_tokens"] == 5
    assert json.loads(from_result(shape(), result))["choices"][0]["text"] == "hi"
    result.prompt_logprobs = [prompt_entry(5, b"a"), prompt_entry(6, b"b")]
    asked = json.loads(from_result(shape(prompt_logprobs=1), result))["choices"][0]["prompt_logprobs"]
    assert [list(each or ()) for each in asked] == [[], ["5", "90"], ["6", "90"]]
    # A job that ended with no worker at hand: log probabilities are in its log only.
    result.prompt_logprobs = None
    assert json.loads(from_result(shape("chat", prompt_logprobs=1), result))["prompt_logprobs"] == [None]
