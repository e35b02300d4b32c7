"""Bodies of requests. Types are strict, unknown fields are ignored, known ones that are not served are refused by name.

Bounds of sampling values are checked by `shared.sampling.SamplingParams`, not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import invalid
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.keys import CLASSES
from shared.protocol import JobClass

T = TypeVar("T")
#: A list that is read up to its first fault: a body may have millions, and each is made to an object.
Many = Annotated[list[T], Field(fail_fast=True)]

MAX_MESSAGES = 4096
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_DEADLINE_S = 7 * 24 * 3600.0
#: Seconds until a job may start, at the most.
MAX_DELAY_S = 7 * 24 * 3600.0


def _empty(value: Any) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}


def _always(value: Any) -> bool:
    return value is None


def is_text_format(value: Any) -> bool:
    """Whether a format of an answer asks for nothing but text."""
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


#: Known fields that are not served, each with the values that ask for nothing.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "tools": _empty,
    "tool_choice": lambda v: v in (None, "none"),
    "functions": _empty,
    "function_call": lambda v: v in (None, "none"),
    "response_format": is_text_format,
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "audio": _always,
    "modalities": lambda v: v in (None, ["text"]),
    "prediction": _always,
    "web_search_options": _always,
    "moderation": _always,
    "reasoning_effort": _always,
    "verbosity": lambda v: v in (None, "medium"),
    "suffix": _empty,
    "prompt_embeds": _always,
    "use_beam_search": _empty,
    "best_of": lambda v: v in (None, 1),
    "length_penalty": lambda v: v in (None, 1, 1.0),
    "logits_processors": _empty,
    "chat_template": _always,
    "documents": _empty,
    "mm_processor_kwargs": _empty,
    "return_token_ids": _empty,
    "return_tokens_as_token_ids": _empty,
    "kv_transfer_params": _always,
    "adapter": _always,
    "lora_request": _always,
}


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="a last chunk without choices carries the usage")


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | Many[dict[str, Any]] | None,
        Field(description="text, or a list of parts of the type `text`; null is empty text"),
    ] = None
    name: str | None = None
    tool_calls: Many[dict[str, Any]] | None = Field(None, description="calls of an earlier turn, given to the template")
    tool_call_id: str | None = None


class GenerationRequest(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str = Field(description="a model of `GET /v1/models`")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="choices per prompt, 1 by default")
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | Many[str] | None = Field(None, description="up to 16 strings")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token ids, as strings, to biases from -100 to 100")
    seed: int | None = Field(None, description="64 bits with sign; drawn by the server where absent")
    user: str | None = Field(None, description="taken, not used")
    metadata: dict[str, str] | None = Field(None, description="up to 16 pairs, echoed by the jobs API")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None, description="`priority` and `fast` are the class `high`, `flex` is `batch`, all else `normal`"
    )
    store: bool | None = Field(None, description="taken, not used: a job is kept for its retention in any case")
    safety_identifier: str | None = Field(None, max_length=512, description="taken, not used")
    parallel_tool_calls: bool | None = Field(None, description="taken, not used")
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(None, description="taken, not used")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="taken, not used")
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: Many[str] | None = None
    allowed_token_ids: Many[int] | None = None
    truncate_prompt_tokens: int | None = Field(None, description="keep the last so many tokens; -1: what fits")
    add_special_tokens: bool | None = Field(None, description="by default true for completions, false for chat")
    prompt_logprobs: int | None = Field(None, description="0 to 20 candidates per token of the prompt; not in a stream")
    skip_reading_prefix_cache: bool | None = Field(None, description="compute the whole prompt anew")
    prompt_cache_key: str | None = Field(None, max_length=256, description="requests of one key share a lane")
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="separates prefix caches")
    priority: int | None = Field(None, description="below 0 is the class `high`, above it `batch`")
    background: bool | None = Field(None, description="go on when the client goes away")

    @property
    def choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def job_class(self) -> JobClass:
        """The class that `service_tier` or `priority` ask for."""
        if self.service_tier in ("priority", "fast", "flex"):
            return "batch" if self.service_tier == "flex" else "high"
        return "normal" if not self.priority else "high" if self.priority < 0 else "batch"


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, description="wins over `max_tokens` where both are given")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="0 to 20; needs `logprobs`")
    add_generation_prompt: bool | None = Field(None, description="true by default")
    continue_final_message: bool | None = Field(None, description="go on with the last message, open-ended")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="only `enable_thinking` and `thinking`")


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: str | list[Any] = Field(description="string, list of strings, list of token ids, or list of such lists")
    logprobs: int | None = Field(None, description="0 to 20")
    top_logprobs: int | None = Field(None, description="another name of `logprobs`")
    echo: bool | None = Field(None, description="put the prompt in front of each choice, in `logprobs` too")
    best_of: int | None = Field(None, description="only the value of `n`")

    @property
    def asks_logprobs(self) -> bool:
        """Under either name."""
        return self.logprobs is not None or self.top_logprobs is not None


class JobRequest(BaseModel):
    """`POST /v1/jobs`."""

    model_config = ConfigDict(strict=True, populate_by_name=True, extra="allow")

    kind: Literal["chat", "completion"] = Field(description="which endpoint `body` belongs to")
    body: dict[str, Any] = Field(description="the body of that endpoint, one prompt")
    adapter: str | None = Field(
        None, max_length=256, description="an adapter; `model` of the body must be its base model"
    )
    job_class: Literal["high", "normal", "batch"] | None = Field(None, alias="class", description=", ".join(CLASSES))
    deadline_s: float | None = Field(
        None, gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False, description="seconds until it must have ended"
    )
    delay_s: float | None = Field(
        None, ge=0, le=MAX_DELAY_S, allow_inf_nan=False, description="seconds until it may start"
    )
    not_before: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="when it may start, in Unix seconds, in place of `delay_s`"
    )
    retention_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds that result and events are kept after its end"
    )
    metadata: dict[str, str] | None = Field(None, description="up to 16 pairs, echoed")
    callback_url: str | None = Field(None, description="https URL that is told, once, when it has ended: a webhook")


class CreateBatchRequest(BaseModel):
    """`POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="allow")

    input_file_id: str = Field(max_length=64, description="a file with the purpose `batch`: JSON lines")
    endpoint: str = Field(max_length=64, description="what all of its lines ask for, such as /v1/chat/completions")
    completion_window: str = Field(max_length=16, description="24h")
    metadata: dict[str, str] | None = Field(None, description="up to 16 pairs, echoed")


class LoadAdapterRequest(BaseModel):
    """`POST /v1/load_lora_adapter` and `POST /v1/adapters`."""

    model_config = ConfigDict(strict=True, extra="allow")

    lora_name: str = Field(max_length=256, description="what requests write as `model`")
    lora_path: str | None = Field(
        None, description="a folder that the server may read, or `owner/name` or `hf:owner/name@revision` of the hub"
    )
    load_inplace: bool | None = Field(None, description="also where the name stands for another adapter")
    base_model: str | None = Field(None, description="a model that serves adapters; may be left out if there is one")
    pin: bool | None = Field(None, description="keep it in the memory of all workers")


class UnloadAdapterRequest(BaseModel):
    """`POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(strict=True)

    lora_name: str = Field(max_length=256)


class JobsRequest(BaseModel):
    """`POST /v1/jobs` with many jobs."""

    model_config = ConfigDict(strict=True, extra="allow")

    jobs: Many[dict[str, Any]] | None = Field(None, description="jobs, each as if it were submitted alone")


class TokenizeRequest(BaseModel):
    """`POST /tokenize`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="may be left out where there is one model")
    prompt: str | None = Field(None, description="either this, or `messages`")
    messages: list[Message] | None = Field(None, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = Field(None, description="by default true for a prompt, false for messages")
    add_generation_prompt: bool | None = Field(None, description="true by default")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="only `enable_thinking` and `thinking`")
    return_token_strs: bool | None = Field(None, description="the tokens as the vocabulary writes them, too")


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = Field(None, description="may be left out where there is one model")
    tokens: Many[int] = Field(description="token ids")


class TokenRequest(BaseModel):
    """`POST /v1/jobs/{id}/token`."""

    model_config = ConfigDict(strict=True)

    expires_in_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds that the token is good for, 300 by default"
    )


M = TypeVar("M", bound=BaseModel)

#: Names that may be shown in the location of an error.
_FIELDS = frozenset(
    name
    for model in (
        ChatCompletionRequest,
        CompletionRequest,
        JobRequest,
        JobsRequest,
        TokenRequest,
        TokenizeRequest,
        DetokenizeRequest,
        LoadAdapterRequest,
        UnloadAdapterRequest,
        Message,
        StreamOptions,
    )
    for name in (*model.model_fields, "class")
)


def parse(model: type[M], data: bytes | dict[str, Any]) -> M:
    """Read one body.

    Raises:
        InvalidRequestError: malformed JSON, a missing field, or one of a wrong type; names the field only.
        UnsupportedParameterError: a known field that is not served.
    """
    try:
        if isinstance(data, dict):
            request = model.model_validate(data)
        else:
            request = model.model_validate_json(data)
    except ValidationError as error:
        raise invalid(error, _FIELDS | frozenset(model.model_fields)) from None
    if isinstance(request, GenerationRequest):
        refuse(request, _REFUSED)
        _check(request)
    return request


def refuse(request: BaseModel, refused: dict[str, Callable[[Any], bool]]) -> None:
    """Refuse known fields that are not served, with any value but those that ask for nothing.

    Raises:
        UnsupportedParameterError: there is one.
    """
    for name, value in (request.model_extra or {}).items():
        accepts = refused.get(name)
        if accepts is not None and not accepts(value):
            raise UnsupportedParameterError(f"{name}: this server does not support it", param=name)


def _check(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options: only allowed when stream is true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs: not available when stream is true", param="prompt_logprobs")
    check_metadata(request.metadata)
    if isinstance(request, ChatCompletionRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest):
        _check_completion(request)


def _check_chat(request: ChatCompletionRequest) -> None:
    if not request.messages:
        raise InvalidRequestError("messages: must not be empty", param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message: cannot go with add_generation_prompt", param="continue_final_message"
        )
    if _empty((request.model_extra or {}).get("echo")) is False:
        raise UnsupportedParameterError("echo: this endpoint does not support it", param="echo")


def _check_completion(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != request.choices:
        raise UnsupportedParameterError("best_of: only the value of n is supported", param="best_of")
    if request.echo and request.stream and (request.asks_logprobs or request.max_tokens == 0):
        raise UnsupportedParameterError("echo: with logprobs, or alone, it is not supported in a stream", param="echo")


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Bounds of a client's own data.

    Raises:
        InvalidRequestError: too many pairs, or too long ones.
    """
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(f"metadata: at most {MAX_METADATA} pairs are allowed", param="metadata")
    if any(len(k) > MAX_METADATA_KEY or len(v) > MAX_METADATA_VALUE for k, v in metadata.items()):
        raise InvalidRequestError(
            f"metadata: keys have at most {MAX_METADATA_KEY} characters, values at most {MAX_METADATA_VALUE}",
            param="metadata",
        )
