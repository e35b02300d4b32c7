"""What a line of a batch asks for, by the batch's endpoint: the gateway's own reading of the same body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec.structs import replace

from gateway import response_requests, response_store
from gateway.admission import Caller
from gateway.answers import Answer
from gateway.preparation import Prepared
from gateway.response_answer import ResponseAnswer
from gateway.response_requests import Asked, ResponsesRequest
from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest, parse
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.jobstore import JobStore
from shared.protocol import Frame


class WholeAnswer(Protocol):
    """What frames are collected in; see `Answer`."""

    def add(self, job: int, frame: Frame, *, chunks: bool) -> bytes: ...
    def whole(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line's request.

    Attributes:
        answer: made of what was prepared.
        naming: a context in which errors get the names of the endpoint's API.
    """

    request: GenerationRequest
    answer: Callable[[Prepared], WholeAnswer]
    naming: Callable[[], AbstractContextManager[None]] = nullcontext


async def read(endpoint: str, body: bytes, store: JobStore, caller: Caller) -> LineRequest:
    """Read a line's body.

    Raises:
        InvalidRequestError, UnsupportedParameterError: with the field at fault.
        ServiceUnavailableError: Redis is away.
    """
    return await _READERS[endpoint](body, store, caller)


async def _chat(body: bytes, store: JobStore, caller: Caller) -> LineRequest:
    return _generation(await asyncio.to_thread(parse, ChatCompletionRequest, body))


async def _completion(body: bytes, store: JobStore, caller: Caller) -> LineRequest:
    return _generation(await asyncio.to_thread(parse, CompletionRequest, body))


def _generation(request: GenerationRequest) -> LineRequest:
    if request.stream:
        raise InvalidRequestError("stream: a batch does not stream", param="stream")
    return LineRequest(request, lambda prepared: Answer(prepared.shape, whole=True))


async def _response(body: bytes, store: JobStore, caller: Caller) -> LineRequest:
    """A response of a batch is in its output alone: it cannot be fetched by its id, nor gone on with."""
    request = await asyncio.to_thread(parse, ResponsesRequest, body)
    response_requests.check(request)
    for name in ("stream", "background", "store"):
        if getattr(request, name):
            raise UnsupportedParameterError(f"{name}: a batch does not do this", param=name)
    before = await response_store.conversation(store, caller, request.previous_response_id)

    def chat() -> tuple[Asked, ChatCompletionRequest]:
        asked = response_requests.asked_of(request, before)
        return replace(asked, store=False), response_requests.chat_of(request, asked)

    asked, inner = await asyncio.to_thread(chat)
    return LineRequest(
        inner, lambda prepared: ResponseAnswer(response_store.shape_of(prepared, asked)), response_requests.renamed
    )


_READERS: Final[dict[str, Callable[[bytes, JobStore, Caller], Awaitable[LineRequest]]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
}
