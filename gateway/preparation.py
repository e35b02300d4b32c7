"""From a parsed request to envelopes: everything that can refuse a request before it touches the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from gateway import answers
from gateway.admission import Caller, JobOptions, envelopes
from gateway.answers import Shape
from gateway.policies import Policies
from gateway.prompts import PromptEncoder, split_prompts
from gateway.sampling import check_choices, echoes_logprobs, echoes_only, sampling_params
from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.served import Directory, Served
from shared.errors import InvalidRequestError
from shared.protocol import Envelope
from shared.settings import GatewaySettings
from shared.trace_context import NO_TRACE
from shared.tracing import OFF, Tracing

#: Plain prompts of up to so many characters are tokenized in the event loop: some 0.1 ms.
INLINE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be queued."""

    envelopes: Sequence[Envelope]
    shape: Shape


class Preparer:
    """Checks, renders and tokenizes requests. Nothing that it refuses has touched the queue."""

    def __init__(
        self,
        directory: Directory,
        executor: Executor,
        settings: GatewaySettings,
        policies: Policies,
        tracing: Tracing = OFF,
    ) -> None:
        self._directory, self._executor, self._settings = directory, executor, settings
        self._policies, self._tracing = policies, tracing

    async def prepare(
        self,
        request: GenerationRequest,
        caller: Caller,
        options: JobOptions,
        *,
        single: bool = False,
        served: Served | None = None,
    ) -> Prepared:
        """Envelopes of a request.

        Args:
            single: refuse more than one prompt.
            served: what it is computed with, where the name of its model does not say so.

        Raises:
            InvalidRequestError, ModelNotFoundError: with the field at fault.
            PermissionDeniedError: the tenant may not use the model, or ask for the class.
            ServiceUnavailableError: Redis is away and the model or the tenant not known here.
        """
        with self._tracing.span("prepare", caller.trace or NO_TRACE) as span:
            prepared = await self._prepare(request, caller, options, single, served)
            if span.recording:
                span.set(
                    {
                        "gen_ai.request.model": request.model,
                        "ropeway.prompts": len(prepared.envelopes),
                        "ropeway.prompt_tokens": sum(len(job.prompt_token_ids) for job in prepared.envelopes),
                    }
                )
            return prepared

    async def _prepare(
        self, request: GenerationRequest, caller: Caller, options: JobOptions, single: bool, served: Served | None
    ) -> Prepared:
        prompts = split_prompts(request.prompt) if isinstance(request, CompletionRequest) else [""]
        if single and len(prompts) > 1:
            raise InvalidRequestError("prompt: a job has one prompt", param="prompt")
        if len(prompts) > self._settings.max_prompts:
            raise InvalidRequestError(
                f"prompt: {len(prompts)} prompts, at most {self._settings.max_prompts} are allowed", param="prompt"
            )
        check_choices(request, len(prompts), self._settings.max_choices)
        policy = await self._policies.of(caller.tenant)
        policy.check_model(request.model if served is None or served.adapter is None else served.adapter)
        job_class = policy.class_of(options.job_class, "priority" if request.service_tier is None else "service_tier")
        options = replace(options, job_class=job_class, weight=policy.weight)
        served = served or await self._directory.find(request.model)
        pool = served.pool
        params = sampling_params(request, pool.card)
        if _is_short(request):
            tokens, echo = _encode(request, pool.encoder)
        else:
            loop = asyncio.get_running_loop()
            tokens, echo = await loop.run_in_executor(self._executor, _encode, request, pool.encoder)
        jobs = envelopes(request, params, tokens, served, caller, options)
        first = [pool.encoder.decode(job.prompt_token_ids[:1]) for job in jobs] if echoes_logprobs(request) else []
        shape = Shape(
            kind=jobs[0].kind,
            model=request.model,
            job_ids=[job.id for job in jobs],
            n=params.n,
            created=answers.now(),
            logprobs=params.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            echo=echo,
            first=first,
            echo_only=echoes_only(request),
            hidden=pool.encoder.special_ids if params.skip_special_tokens else frozenset(),
        )
        return Prepared(jobs, shape)


def _is_short(request: GenerationRequest) -> bool:
    """Whether a prompt takes less time to tokenize than to hand over to a thread. A chat's template may take long."""
    if not isinstance(request, CompletionRequest):
        return False
    return isinstance(request.prompt, str) and len(request.prompt) <= INLINE_CHARS


def _encode(request: GenerationRequest, encoder: PromptEncoder) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and the text of each where it is echoed. Runs in a thread if the prompt is long."""
    special = request.add_special_tokens
    if isinstance(request, ChatCompletionRequest):
        ids = encoder.chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            kwargs=request.chat_template_kwargs,
            add_special_tokens=bool(special),
        )
        return [ids], []
    assert isinstance(request, CompletionRequest)
    tokens = encoder.completion(request.prompt, add_special_tokens=special is not False)
    if not request.echo:
        return tokens, []
    prompts = split_prompts(request.prompt)
    return tokens, [p if isinstance(p, str) else encoder.decode(p) for p in prompts]
