"""What makes a request impossible to serve, with true numbers. Called before anything of it is kept."""

from __future__ import annotations

from typing import Any

from engine.adapters.library import AdapterLibrary
from engine.request import EngineRequest, ResumedChoice
from shared.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedParameterError,
)


def checked_prompt(request: EngineRequest, vocab_size: int, room: int) -> list[int]:
    """The prompt's ids, the last `truncate_prompt_tokens` of them where that is set.

    -1 keeps as many as leave `max_tokens`, or one where that is not set, of the `room` for prompt and output.

    Raises:
        InvalidRequestError: an empty prompt, or an id in prompt or params out of the vocabulary.
    """
    params, prompt = request.params, request.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("prompt: must not be empty", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequestError(f"prompt: a token id is not in the vocabulary of {vocab_size} ids", param="prompt")
    params.check_vocabulary(vocab_size)
    keep = params.truncate_prompt_tokens
    if keep is None:
        return prompt
    return prompt[-(max(1, room - (params.max_tokens or 1)) if keep == -1 else keep) :]


def check_adapter(request: EngineRequest, library: AdapterLibrary[Any] | None) -> None:
    """Refuse what would else be answered by the base model.

    Raises:
        UnsupportedParameterError: no adapters are served.
        ModelNotFoundError: this one is not registered.
    """
    if request.adapter is None:
        return
    if library is None:
        raise UnsupportedParameterError("adapter: this engine serves none (enable_lora)", param="adapter")
    if not library.knows(request.adapter):
        raise ModelNotFoundError("adapter: it is not registered", param="adapter")


def checked_length(prompt: int, max_tokens: int | None, *, context: int, kv_tokens: int) -> int:
    """The length in tokens at which a choice ends.

    The context caps `max_tokens`; what the whole KV cache cannot hold is refused. Without `max_tokens` both cap.

    Raises:
        ContextLengthExceededError: it can never fit.
    """
    for name, room in (("context", context), ("KV cache", kv_tokens)):
        if prompt >= room:
            raise ContextLengthExceededError(
                f"the prompt has {prompt} tokens; with at least one token of output it must fit into the {name} of "
                f"{room} tokens",
                param="prompt",
            )
    if max_tokens is None:
        return min(context, kv_tokens)
    length = min(context, prompt + max_tokens)
    if length > kv_tokens:
        raise ContextLengthExceededError(
            f"the prompt has {prompt} tokens and max_tokens is {max_tokens}: {length} tokens do not fit into the "
            f"KV cache of {kv_tokens} tokens",
            param="max_tokens",
        )
    return length


def checked_resume(request: EngineRequest, vocab_size: int) -> dict[int, ResumedChoice]:
    """The resumed choices by index.

    Raises:
        InvalidRequestError: an index twice or not below `n`, or an id out of the vocabulary.
    """
    resumed = {choice.index: choice for choice in request.resume}
    if len(resumed) != len(request.resume) or not all(0 <= index < request.params.n for index in resumed):
        raise InvalidRequestError("resume: choice indices must be distinct and below n", param="resume")
    if any(not 0 <= token < vocab_size for choice in request.resume for token in choice.token_ids):
        raise InvalidRequestError("resume: a token id is not in the vocabulary", param="resume")
    return resumed


def checked_prompt_logprobs(request: EngineRequest, prompt: int) -> int:
    """How many of the prompt's log probabilities are published already.

    Raises:
        InvalidRequestError: more than there are, or not all although a choice has tokens.
    """
    done, most = request.prompt_logprobs_done, prompt - 1
    if request.params.prompt_logprobs is None:
        return 0
    if not 0 <= done <= most or (done < most and any(choice.token_ids for choice in request.resume)):
        raise InvalidRequestError(
            f"prompt_logprobs_done: {done} of {most} entries do not fit what is resumed", param="prompt_logprobs_done"
        )
    return done
