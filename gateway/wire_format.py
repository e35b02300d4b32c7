"""Shapes of the OpenAI API and of the jobs API, and how frames become them. Structs, encoded once, no validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from shared.protocol import ChoiceFrame, ErrorInfo, FinishReason, Frame, TokenLogprob, Usage

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

DONE = b"data: [DONE]\n\n"
# One newline, not two: a blank line makes some clients (openai's among them) dispatch an event without data.
KEEPALIVE = b": keepalive\n"


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Tokens, as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, usages: Sequence[Usage]) -> UsageBody:
        """The sum over a request's jobs."""
        prompt, completion = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
        return cls(prompt, completion, prompt + completion, PromptDetails(sum(u.cached_tokens for u in usages)))


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer of a chat."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """A choice of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A choice of a chat chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice of a completion, whole or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Body(msgspec.Struct, frozen=True):
    """Answer or chunk of either endpoint. Only a chat has its prompt's log probabilities here."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET


def tier_of(asked: str) -> Literal["default", "priority", "flex"]:
    """The service tier that a request is served in."""
    return "flex" if asked == "flex" else "priority" if asked in ("priority", "fast") else "default"


def event(data: bytes, number: int | None = None) -> bytes:
    """One server-sent event."""
    if number is None:
        return b"data: " + data + b"\n\n"
    return b"id: %d\ndata: %b\n\n" % (number, data)


def frame_event(frame: Frame, error: ErrorInfo | None) -> bytes:
    """A frame as an event of `GET /v1/jobs/{id}/events`; `error` is the frame's as clients may see it."""
    data: dict[str, Any] = {
        "seq": frame.seq,
        "kind": frame.kind,
        "choices": [_choice(choice) for choice in frame.choices],
    }
    if frame.prompt_logprobs:
        data["prompt_logprobs"] = prompt_logprobs(frame.prompt_logprobs, _widest(frame.prompt_logprobs))
    if frame.status is not None:
        data["status"] = frame.status
    if frame.usage is not None:
        data["usage"] = UsageBody.of([frame.usage])
    if error is not None:
        data["error"] = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return event(encode(data), frame.seq)


def _choice(choice: ChoiceFrame) -> dict[str, Any]:
    data: dict[str, Any] = {
        "index": choice.index,
        "offset": choice.offset,
        "text": choice.text,
        "token_ids": choice.ids,
        "finish_reason": choice.finish,
    }
    if choice.finish is not None:
        data["stop_reason"] = choice.stop
    if choice.logprobs is not None:
        data["logprobs"] = chat_logprobs(choice.logprobs, _widest(choice.logprobs)).content
    return data


def _widest(entries: Sequence[TokenLogprob]) -> int:
    return max((len(entry.top) for entry in entries), default=0)
