"""`LLM`: batch inference in one process, with vLLM's call shapes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from engine.adapters.request import Adapted, LoRARequest, NamedAdapters
from engine.chat import render_chat
from engine.config import CpuKernels, Device, DType, EngineConfig
from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, candidates
from engine.request import EngineRequest, StepOutput
from engine.startup import start_engine
from engine.validation import checked_prompt
from kernels.backends import Kernels
from shared.errors import InvalidRequestError
from shared.sampling import SamplingParams

#: A text, or a dictionary with `prompt` or with `prompt_token_ids`.
Prompt = str | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model in this process. Calls must come from one thread at a time."""

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        *,
        dtype: DType = "auto",
        device: Device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 1024,
        long_prefill_token_threshold: int | None = None,
        deterministic: bool = False,
        kernels: Kernels = "auto",
        cpu_kernels: CpuKernels = "auto",
        enforce_eager: bool = False,
        cudagraph_capture_sizes: Sequence[int] | None = None,
        async_scheduling: bool | None = None,
        screen_head: bool = True,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        max_cpu_loras: int | None = None,
        seed: int | None = None,
        enable_prefix_caching: bool = True,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_mb: int | None = None,
        gpu_memory_utilization: float = 0.9,
        threads: int | None = None,
        cpu_pinning: str = "none",
        map_weights: bool = False,
        cache_dir: Path | None = None,
    ) -> None:
        """Load a model; settings are those of `EngineConfig`.

        Args:
            seed: makes the seeds of requests that have none a fixed sequence; None: they are drawn.

        Raises:
            ValueError: the model is not found or not served, or a setting does not fit it.
        """
        self._engine = start_engine(
            EngineConfig(
                model=model,
                device=device,
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_token_threshold=long_prefill_token_threshold,
                deterministic=deterministic,
                kernels=kernels,
                cpu_kernels=cpu_kernels,
                enforce_eager=enforce_eager,
                cudagraph_capture_sizes=cudagraph_capture_sizes,
                async_scheduling=async_scheduling,
                screen_head=screen_head,
                enable_lora=enable_lora,
                max_loras=max_loras,
                max_lora_rank=max_lora_rank,
                max_cpu_loras=max_cpu_loras,
                block_size=block_size,
                num_blocks=num_blocks,
                num_gpu_blocks_override=num_gpu_blocks_override,
                kv_cache_memory_mb=kv_cache_memory_mb,
                gpu_memory_utilization=gpu_memory_utilization,
                enable_prefix_caching=enable_prefix_caching,
                threads=threads,
                cpu_pinning=cpu_pinning,
                map_weights=map_weights,
                cache_dir=cache_dir,
            )
        )
        self._info = self._engine.info()
        self._adapters = NamedAdapters(self._engine.library, self._info.max_lora_rank)
        self._tokenizer = self._engine.tokenizer
        self._own_tokenizer: Tokenizer | None = None
        self._ids = count()
        self._seeds = None if seed is None else random.Random(seed)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: one of the caller's own, so that settings of it change nothing here."""
        if self._own_tokenizer is None:
            self._own_tokenizer = Tokenizer.from_str(self._info.tokenizer_json)
        return self._own_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes where it is given none: the generation config's values."""
        defaults: dict[str, Any] = dict(self._info.sampling_defaults)
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return SamplingParams(**defaults)

    def set_adapters(self, adapters: Sequence[LoRARequest]) -> None:
        """Register adapters, these and no others, so that `lora_request` can name them. Nothing is loaded yet.

        Raises:
            InvalidRequestError: one cannot be read, its rank is above `max_lora_rank`, or adapters are not enabled;
                nothing has changed then.
        """
        self._adapters.set(adapters)

    def list_adapters(self) -> list[str]:
        """Names that `lora_request` can take, sorted."""
        return self._adapters.names

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapted | Sequence[Adapted] = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one moving batch.

        Args:
            prompts: one or several; see `Prompt`.
            sampling_params: for all, or one per prompt; None: the model's own.
            use_tqdm: show progress on standard error.
            lora_request: the adapter for all, or one per prompt: a `LoRARequest`, a registered name, or None.

        Returns:
            One output per prompt, in order. A request that fails while it runs has `error` set.

        Raises:
            InvalidRequestError: a prompt or its parameters can never be served; nothing was generated then.
            ModelNotFoundError: no adapter has this name.
        """
        items = [prompts] if isinstance(prompts, str | Mapping) else _list("prompts", prompts)
        return self._run([self._parse(item) for item in items], sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        lora_request: Adapted | Sequence[Adapted] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template; `lora_request` as in `generate`.

        Raises:
            InvalidRequestError: as `generate`; also if the model has no template, or it refuses the messages.
        """
        template = self._info.chat_template
        if template is None:
            raise InvalidRequestError("messages: this model has no chat template", param="messages")
        listed = _list("messages", messages)
        conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in conversations:
            text = render_chat(
                template,
                conversation,
                self._info.special_tokens,
                add_generation_prompt=add_generation_prompt,
            )
            # The template has written the special tokens itself.
            prompts.append((text, self._tokenizer.encode(text, add_special_tokens=False).ids))
        return self._run(prompts, sampling_params, use_tqdm, lora_request)

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                ids = _list("prompt_token_ids", prompt["prompt_token_ids"])
                if not all(isinstance(each, int) for each in ids):
                    raise InvalidRequestError("prompt_token_ids: each must be an integer", param="prompt_token_ids")
                return prompt.get("prompt"), ids
            prompt = prompt.get("prompt", "")
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                "prompts: each must be a text or a dictionary with prompt_token_ids", param="prompts"
            )
        return prompt, self._tokenizer.encode(prompt).ids

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: Adapted | Sequence[Adapted],
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(prompts)
        else:
            params = _list("sampling_params", sampling_params)
            if not all(isinstance(each, SamplingParams) for each in params):
                raise InvalidRequestError("sampling_params: each must be a SamplingParams", param="sampling_params")
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params: {len(params)} for {len(prompts)} prompts", param="sampling_params"
            )
        one = lora_request is None or isinstance(lora_request, str | LoRARequest)
        adapted: Sequence[Adapted] = [lora_request] * len(prompts) if one else lora_request  # type: ignore[list-item,assignment]
        if len(adapted) != len(prompts):
            raise InvalidRequestError(f"lora_request: {len(adapted)} for {len(prompts)} prompts", param="lora_request")
        identities = [self._adapters.resolve(each) for each in adapted]
        outputs: dict[str, RequestOutput] = {}
        try:
            for (text, ids), each, identity in zip(prompts, params, identities, strict=True):
                output = self._add(text, ids, each, identity)
                outputs[output.request_id] = output
            # The name is vLLM's; the bar is rich's.
            with Progress(console=Console(stderr=True), disable=not use_tqdm, transient=True) as progress:
                task = progress.add_task("Prompts", total=len(outputs))
                while self._engine.has_work():
                    for step in self._engine.step():
                        _collect(outputs[step.request_id], step)
                        if step.finished:
                            progress.advance(task)
        except BaseException:  # a refused prompt, or Ctrl-C: nothing of this call may stay in the engine
            for request_id in outputs:
                self._engine.abort(request_id)
            raise
        return list(outputs.values())

    def _add(self, text: str | None, ids: list[int], params: SamplingParams, adapter: str | None) -> RequestOutput:
        if params.seed is None and self._seeds is not None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        request = EngineRequest(str(next(self._ids)), ids, params, adapter=adapter)
        # As the engine cuts it, so that the output shows what the model sees.
        room = min(self._info.max_model_len, self._info.kv_tokens)
        request.prompt_token_ids = checked_prompt(request, self._info.vocab_size, room)
        self._engine.add(request)
        return RequestOutput(
            request_id=request.id,
            prompt=text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(index) for index in range(params.n)],
            finished=False,
            metrics=RequestMetrics(time.monotonic()),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )


def _list(name: str, value: Any) -> list[Any]:
    """An argument that holds several things.

    Raises:
        InvalidRequestError: it does not.
    """
    if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name}: must be a list, not {type(value).__name__}", param=name)
    return list(value)


def _collect(output: RequestOutput, step: StepOutput) -> None:
    """Add what a step did for a request."""
    if output.prompt_logprobs is not None:
        output.prompt_logprobs += map(candidates, step.prompt_logprobs)
    for delta in step.choices:
        choice = output.outputs[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.add_logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if output.metrics.first_token_time is None and delta.token_ids:
            output.metrics.first_token_time = time.monotonic()
    if step.finished:
        output.finished, output.error = True, step.error
        output.metrics.finished_time = time.monotonic()
        output.num_cached_tokens = step.usage.cached_tokens
