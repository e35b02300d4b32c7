"""From the fields of a request to `SamplingParams`: names, and defaults of the model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from shared.errors import InvalidRequestError
from shared.protocol import Card
from shared.sampling import MAX_LOGIT_BIAS, MAX_N, SamplingParams

#: Fields that go over as they are, where the client gave them.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "stop",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "skip_reading_prefix_cache",
    "prompt_logprobs",
)
#: What a model's generation config may set; the first four are what vLLM takes from it too.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: Fields that win over those whose values they stand for.
_OTHER_NAMES = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
_TOKEN_ID = re.compile(r"\d{1,10}\Z", re.ASCII)
DEFAULT_COMPLETION_TOKENS = 16


def sampling_params(request: GenerationRequest, card: Card) -> SamplingParams:
    """The request's parameters, checked. `max_tokens` is None where the client gave none.

    Raises:
        InvalidRequestError: out of bounds; `param` is the client's own name of the field.
    """
    values: dict[str, Any] = dict(model_defaults(card.sampling_defaults))
    values |= {name: v for name in _SAME if (v := getattr(request, name)) is not None}
    values["max_tokens"] = asked_tokens(request)
    values |= _logprobs(request)
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    if request.stop == []:
        values["stop"] = None
    try:
        params = SamplingParams(**values)
        params.check_vocabulary(card.vocab_size)
        if echoes_logprobs(request):
            params.prompt_logprobs = max(params.prompt_logprobs or 0, params.logprobs or 0)
    except InvalidRequestError as error:
        raise _renamed(error, request) from None
    return params


def model_defaults(defaults: Mapping[str, float]) -> dict[str, float]:
    """What the model's own generation config says of sampling."""
    known = {name: defaults[name] for name in _DEFAULTS if name in defaults}
    if "top_k" in known:
        known["top_k"] = int(known["top_k"])
    return known


def asked_tokens(request: GenerationRequest) -> int | None:
    """The client's `max_tokens`; `max_completion_tokens` wins where both are given. A job has one at least."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return 1 if echoes_only(request) else request.max_tokens


def echoes_logprobs(request: GenerationRequest) -> bool:
    """Whether the log probabilities of the answer begin with those of the prompt."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.asks_logprobs


def echoes_only(request: GenerationRequest) -> bool:
    """Whether only the prompt is asked for, as evaluations do."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def draw_seed() -> int:
    """A seed of 63 random bits, for a job whose client gave none: then whoever takes it up again draws the same."""
    return secrets.randbits(63)


def check_choices(request: GenerationRequest, prompts: int, most: int) -> None:
    """Bound the choices of the whole request.

    Raises:
        InvalidRequestError: more than `most`.
    """
    if not 1 <= request.choices <= MAX_N:
        raise InvalidRequestError(f"n: must be from 1 to {MAX_N}", param="n")
    if prompts * request.choices > most:
        raise InvalidRequestError(
            f"n: {prompts} prompts of {request.choices} choices are more than the {most} choices allowed", param="n"
        )


def _logprobs(request: GenerationRequest) -> dict[str, int | None]:
    if isinstance(request, ChatCompletionRequest):
        return {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
    assert isinstance(request, CompletionRequest)
    return {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs}


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias: has {len(bias)} entries, at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias"
        )
    if not all(_TOKEN_ID.match(key) for key in bias):
        raise InvalidRequestError("logit_bias: keys must be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _renamed(error: InvalidRequestError, request: GenerationRequest) -> InvalidRequestError:
    """The error under the name that the client used."""
    if error.param not in _OTHER_NAMES:
        return error
    name = _OTHER_NAMES[error.param]
    if getattr(request, name, None) is None:
        return error
    return type(error)(error.message.replace(error.param, name, 1), param=name, code=error.error_code)
