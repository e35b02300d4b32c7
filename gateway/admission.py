"""What may be queued: who asks, the rule for lengths, and the envelopes of a request."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.catalogue import Pool
from gateway.keyring import ANONYMOUS
from gateway.sampling import DEFAULT_COMPLETION_TOKENS, draw_seed
from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.served import Served
from shared import keys
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.keys import JobId
from shared.protocol import Envelope, JobClass
from shared.sampling import SamplingParams

#: Candidates of all prompts that one answer may hold: about 17 MB of JSON, made from 110 MB of memory.
MAX_PROMPT_CANDIDATES = 2**18


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        tenant: from the key.
        authenticated: whether there was one: then prefix caches of tenants are kept apart.
        request_id: the client's X-Request-Id, echoed only.
        trace: W3C trace context, passed on.
        key: public id of the key, under which usage counts; empty without one.
    """

    tenant: str = ANONYMOUS
    authenticated: bool = False
    request_id: str | None = None
    trace: dict[str, str] | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What of a job is not in its request; `weight` is its tenant's."""

    job_class: JobClass
    flush_ms: int
    metadata: dict[str, str]
    weight: float = 1.0


def fit(request: GenerationRequest, params: SamplingParams, prompt: list[int], pool: Pool) -> tuple[list[int], int]:
    """The prompt, cut if asked to be, and the `max_tokens` of its job.

    The rule: the prompt must leave room for one token; prompt plus `max_tokens` must fit in the context, and that times
    `n` in the KV cache of one worker, since a job is taken as a whole. Nothing is clamped that the client asked for.
    Without `max_tokens` a chat gets what is left, and a completion at most 16 of that.

    Raises:
        ContextLengthExceededError: it does not fit; the message has the numbers.
    """
    limit, param = pool.max_sequence, "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    what = "context" if limit == pool.card.max_model_len else "KV cache"
    prompt = _truncated(request, prompt, limit, params.max_tokens)
    if len(prompt) >= limit:
        raise ContextLengthExceededError(
            f"{param}: the prompt has {len(prompt)} tokens, the {what} of this model holds {limit}, "
            "and one must be left for the answer",
            param=param,
        )
    room = limit - len(prompt)
    if params.n > 1 and pool.kv_tokens:
        _check_choices_fit(params, len(prompt), pool.kv_tokens)
        if params.max_tokens is None:
            room = min(room, pool.kv_tokens // params.n - len(prompt))
    if params.max_tokens is None:
        return prompt, _default_tokens(request, params, len(prompt), room)
    if params.max_tokens > room:
        name = _tokens_name(request)
        raise ContextLengthExceededError(
            f"{name}: the prompt has {len(prompt)} tokens and {params.max_tokens} are asked for, "
            f"{len(prompt) + params.max_tokens} together; the {what} of this model holds {limit}",
            param=name,
        )
    return prompt, params.max_tokens


def _check_choices_fit(params: SamplingParams, prompt: int, kv_tokens: int) -> None:
    """Refuse a job that no worker could ever hold as a whole: it would wait in front of others until its deadline."""
    together = (prompt + (params.max_tokens or 1)) * params.n
    if together > kv_tokens:
        raise ContextLengthExceededError(
            f"n: {params.n} choices of {prompt} prompt tokens and {params.max_tokens or 1} more are {together} tokens; "
            f"the KV cache of this model holds {kv_tokens}",
            param="n",
        )


def _default_tokens(request: GenerationRequest, params: SamplingParams, prompt: int, room: int) -> int:
    most = min(room, DEFAULT_COMPLETION_TOKENS) if isinstance(request, CompletionRequest) else room
    if params.min_tokens > most:
        if params.min_tokens > room:
            raise ContextLengthExceededError(
                f"min_tokens: {params.min_tokens} are asked for, {room} are left behind a prompt of {prompt} tokens",
                param="min_tokens",
            )
        return params.min_tokens
    return most


def _truncated(request: GenerationRequest, prompt: list[int], limit: int, max_tokens: int | None) -> list[int]:
    """The last tokens of the prompt, as many as `truncate_prompt_tokens` says; -1 is as many as fit."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(1, limit - (max_tokens or 1))
    if keep < 1:
        raise InvalidRequestError("truncate_prompt_tokens: must be -1 or at least 1", param="truncate_prompt_tokens")
    return prompt[-keep:]


def envelopes(
    request: GenerationRequest,
    params: SamplingParams,
    prompts: Sequence[list[int]],
    served: Served,
    caller: Caller,
    options: JobOptions,
) -> list[Envelope]:
    """One envelope per prompt, each with an id of its own.

    Raises:
        ContextLengthExceededError: a prompt does not fit; nothing is queued of the others either.
        InvalidRequestError: see `check_prompt_logprobs`.
    """
    pool = served.pool
    fitted = [fit(request, params, prompt, pool) for prompt in prompts]
    check_prompt_logprobs(request, params, [prompt for prompt, _ in fitted])
    salt = cache_salt(caller, request.cache_salt)
    created = time.time_ns() // 1_000_000
    result = []
    for prompt, max_tokens in fitted:
        lane = keys.lane_of(
            pool.card.lanes, adapter=served.identity, prompt_cache_key=request.prompt_cache_key, token_ids=prompt
        )  # fmt: skip
        sampling = copy.copy(params)
        sampling.max_tokens = max_tokens
        sampling.seed = draw_seed() if params.seed is None else params.seed
        result.append(
            Envelope(
                id=str(JobId.new(pool.card.pool, lane)),
                tenant=caller.tenant,
                model=request.model,
                adapter=served.adapter,
                adapter_identity=served.identity,
                prompt_token_ids=prompt,
                sampling=sampling,
                kind="chat" if isinstance(request, ChatCompletionRequest) else "completion",
                job_class=options.job_class,
                cache_salt=salt,
                flush_ms=options.flush_ms,
                request_id=caller.request_id,
                metadata=options.metadata,
                trace=caller.trace or {},
                created_ms=created,
                key=caller.key,
                weight=options.weight,
            )
        )
    return result


def check_prompt_logprobs(request: GenerationRequest, params: SamplingParams, prompts: Sequence[list[int]]) -> None:
    """Bound what an answer says of its prompts; each choice of a completion says it again.

    Raises:
        InvalidRequestError: more than `MAX_PROMPT_CANDIDATES`.
    """
    if params.prompt_logprobs is None:
        return
    times = 1 if isinstance(request, ChatCompletionRequest) else params.n
    candidates = sum(map(len, prompts)) * (1 + params.prompt_logprobs) * times
    if candidates > MAX_PROMPT_CANDIDATES:
        param = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{param}: the prompts have {candidates} candidates in all choices together, "
            f"at most {MAX_PROMPT_CANDIDATES} are allowed",
            param=param,
        )


def cache_salt(caller: Caller, clients: str | None) -> str | None:
    """What separates prefix caches: the tenant's own, with the client's mixed in, so that no one can take another's."""
    if not caller.authenticated and clients is None:
        return None
    mixed = hashlib.blake2b(key=caller.tenant.encode()[:64], digest_size=16)
    mixed.update(b"" if clients is None else b"\x01" + clients.encode("utf-8", "surrogatepass"))
    return mixed.hexdigest()


def _tokens_name(request: GenerationRequest) -> str:
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"
