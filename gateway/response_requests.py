"""Bodies of the Responses API, and the chat that each of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from gateway.schemas import ChatCompletionRequest, Many, check_metadata, is_text_format, parse, refuse
from shared.errors import InvalidRequestError, ProtocolError, UnsupportedParameterError

#: Fields of vLLM and of chats that go over as they are.
_EXTRAS: Final = (
    "seed", "stop", "top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop_token_ids", "ignore_eos", "logit_bias", "bad_words", "allowed_token_ids", "skip_reading_prefix_cache",
    "cache_salt", "priority", "chat_template_kwargs", "truncate_prompt_tokens", "include_stop_str_in_output",
)  # fmt: skip
#: Names of fields of the chat that have another one here.
_NAMES: Final = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_ROLES: Final = ("user", "assistant", "system", "developer")
_PARTS: Final = ("input_text", "output_text", "text")
MAX_ITEMS: Final = 4096
_MAX_INT32: Final = 2**31 - 1


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}, 0)


def _nothing(value: Any) -> bool:
    return value is None


def _is_plain_text(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict) and is_text_format(value.get("format")) and value.get("verbosity") in (None, "medium")
    )


def _asks_no_reasoning(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(v in (None, "none") for v in value.values()))


#: Known fields that are not served, each with the values that ask for nothing.
_REFUSED: Final[dict[str, Callable[[Any], bool]]] = {
    "tools": _empty,
    "tool_choice": lambda v: v in (None, "none", "auto"),
    "max_tool_calls": _nothing,
    "text": _is_plain_text,
    "reasoning": _asks_no_reasoning,
    "include": _empty,
    "top_logprobs": _empty,
    "conversation": _nothing,
    "prompt": _nothing,
    "truncation": lambda v: v in (None, "disabled"),
    "moderation": _nothing,
    "image": _nothing,
    "context_management": _empty,
    "background_options": _nothing,
    "access_programs": _nothing,
    "structured_outputs": _empty,
    "adapter": _nothing,
}


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str = Field(description="a model of `GET /v1/models`")
    input: str | Many[dict[str, Any]] = Field(description="text, or messages whose content is text or parts of it")
    instructions: str | None = Field(None, description="a system message in front; not carried on by later responses")
    max_output_tokens: int | None = Field(None, description="what is left of the context, by default")
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = Field(None, description="up to 16 pairs, echoed")
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, description="taken, not used")
    background: bool | None = Field(None, description="answer at once; the response is made whoever is connected")
    store: bool | None = Field(None, description="false: nothing is kept once it was answered; true by default")
    previous_response_id: str | None = Field(None, max_length=256, description="go on with its conversation")
    parallel_tool_calls: bool | None = Field(None, description="taken, not used")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None, description="`priority` and `fast` are the class `high`, `flex` is `batch`"
    )
    prompt_cache_key: str | None = Field(None, max_length=256, description="requests of one key share a lane")
    safety_identifier: str | None = Field(None, max_length=512, description="echoed, not used")
    user: str | None = Field(None, max_length=512, description="echoed, not used")


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Asked(msgspec.Struct, kw_only=True, frozen=True):
    """What is kept of a request, with its job, to show it and to go on with it.

    Attributes:
        conversation: all that came before the answer, without instructions.
        own: how many of its last messages came with this request.
    """

    v: int = 1
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None
    parallel_tool_calls: bool = True
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    conversation: list[Turn] = []
    own: int = 0


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Asked)


def encode(asked: Asked) -> bytes:
    """As a job keeps it."""
    return _ENCODER.encode(asked)


def decode(data: bytes) -> Asked:
    """What a job has kept.

    Raises:
        ProtocolError: it does not decode.
    """
    try:
        asked = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError("a response's request does not decode") from error
    if asked.v != 1:
        raise ProtocolError("a response's request has a version that this process does not know")
    return asked


def check(request: ResponsesRequest) -> None:
    """What the types do not say.

    Raises:
        InvalidRequestError: fields that contradict each other, or too many messages.
        UnsupportedParameterError: a known field that is not served.
    """
    refuse(request, _REFUSED)
    check_metadata(request.metadata)
    if request.background and request.store is False:
        raise InvalidRequestError("background: needs the response to be stored", param="background")
    most = request.max_output_tokens
    if most is not None and not 1 <= most <= _MAX_INT32:  # it is kept as it is, before anybody looks at the chat
        raise InvalidRequestError(f"max_output_tokens: must be from 1 to {_MAX_INT32}", param="max_output_tokens")
    if isinstance(request.input, list) and not 1 <= len(request.input) <= MAX_ITEMS:
        raise InvalidRequestError(f"input: must have from 1 to {MAX_ITEMS} items", param="input")


def asked_of(request: ResponsesRequest, before: Sequence[Turn]) -> Asked:
    """What is kept of a request; `before` is the conversation that it goes on with.

    Raises:
        InvalidRequestError, UnsupportedParameterError: an item of the input is not text.
    """
    own = _turns(request.input)
    return Asked(
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        background=bool(request.background),
        store=request.store is not False,
        previous_response_id=request.previous_response_id,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        service_tier=request.service_tier,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        user=request.user,
        conversation=[*before, *own],
        own=len(own),
    )


def chat_of(request: ResponsesRequest, asked: Asked) -> ChatCompletionRequest:
    """The chat behind a response.

    Raises:
        InvalidRequestError, UnsupportedParameterError: as of a chat, under this API's names.
    """
    turns = list(asked.conversation)
    if asked.instructions:
        turns.insert(0, Turn("system", asked.instructions))
    extras = request.model_extra or {}
    body = {name: extras[name] for name in _EXTRAS if extras.get(name) is not None}
    body |= {
        "model": request.model,
        "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": bool(request.stream),
        "background": bool(request.background),
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": request.service_tier,
        "metadata": request.metadata,
    }
    with renamed():
        return parse(ChatCompletionRequest, body)


@contextmanager
def renamed() -> Iterator[None]:
    """Parameters of the chat are named as here."""
    try:
        yield
    except InvalidRequestError as error:
        name = (error.param or "").partition("[")[0]
        if name not in _NAMES:
            raise
        message = error.message.replace(error.param or name, _NAMES[name], 1)
        raise type(error)(message, param=_NAMES[name], code=error.error_code) from None


def _turns(given: str | list[dict[str, Any]]) -> list[Turn]:
    if isinstance(given, str):
        return [Turn("user", given)]
    return [_turn(item, f"input[{index}]") for index, item in enumerate(given)]


def _turn(item: dict[str, Any], where: str) -> Turn:
    if item.get("type", "message") != "message":
        raise UnsupportedParameterError(
            f"{where}.type: only items of the type 'message' are supported", param=f"{where}.type"
        )
    if item.get("role") not in _ROLES:
        raise InvalidRequestError(f"{where}.role: must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    return Turn(item["role"], _text(item.get("content"), f"{where}.content"))


def _text(content: Any, where: str) -> str:
    """Text of an item; several parts are joined by a line break, as in a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}: must be text or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _PARTS:
            place = f"{where}[{index}].type"
            raise UnsupportedParameterError(f"{place}: only parts of text are supported", param=place)
        if not isinstance(part.get("text"), str):
            place = f"{where}[{index}].text"
            raise InvalidRequestError(f"{place}: must be a string", param=place)
        texts.append(part["text"])
    return "\n".join(texts)
