"""Shapes of the OpenAI API and of the jobs API, and how frames become them. Structs, encoded once, no validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shared.protocol import ChoiceFrame, ErrorInfo, FinishReason, Frame, TokenLogprob, TopLogprob, Usage

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

DONE = b"data: [DONE]\n\n"
# One newline, not two: a blank line makes some clients (openai's among them) dispatch an event without data.
KEEPALIVE = b": keepalive\n"
#: The least log probability that is sent: JSON has no infinity.
LOGPROB_FLOOR = -9999.0


class TopToken(msgspec.Struct, frozen=True):
    """A candidate of a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    """A token of a chat answer with its log probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a chat answer, one entry per token."""

    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a completion, one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


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


class Body(msgspec.Struct, frozen=True):
    """Answer or chunk of either endpoint."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: None = None


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, LOGPROB_FLOOR) if math.isfinite(logprob) else LOGPROB_FLOOR


def chat_logprobs(entries: Sequence[TokenLogprob], most: int) -> ChatLogprobs:
    """Entries as chat shows them, with at most `most` candidates each."""
    return ChatLogprobs(
        [
            ChatToken(_text(e.token), finite(e.logprob), list(e.token), [_top(candidate) for candidate in e.top[:most]])
            for e in entries
        ]
    )


def completion_logprobs(entries: Sequence[TokenLogprob], most: int, offset: int) -> CompletionLogprobs:
    """Entries as completions show them; the sampled token is always among the candidates.

    `offset` is the first token's place in the choice's text.
    """
    tokens = [_text(e.token) for e in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = []
    for token, entry in zip(tokens, entries, strict=True):
        top = {_text(candidate.token): finite(candidate.logprob) for candidate in entry.top[:most]}
        top.setdefault(token, finite(entry.logprob))
        tops.append(top)
    return CompletionLogprobs(tokens, [finite(e.logprob) for e in entries], tops, offsets)


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
        data["logprobs"] = chat_logprobs(choice.logprobs, max((len(e.top) for e in choice.logprobs), default=0)).content
    return data


def _top(candidate: TopLogprob) -> TopToken:
    return TopToken(_text(candidate.token), finite(candidate.logprob), list(candidate.token))


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
