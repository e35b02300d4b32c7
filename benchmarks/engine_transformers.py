"""The engine against transformers' `generate` on the same weights, and against the memory's speed."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.common import MODEL, workload
from benchmarks.reference import reference_model

if TYPE_CHECKING:
    from engine.llm import LLM

NEW_TOKENS = 64
SINGLE_PROMPT = 4
_BANDWIDTH_BYTES = 1 << 30


def run_reference(model: Any, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> float:
    """Seconds of transformers' `generate` over a left-padded batch."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    seconds = time.perf_counter() - start
    if out.shape[1] != longest + new_tokens:
        raise RuntimeError("transformers ended early")
    return seconds


def run_ropeway(llm: LLM, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> float:
    """Seconds of `LLM.generate`."""
    from shared.sampling import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    if any(len(output.outputs[0].token_ids) != new_tokens for output in outputs):
        raise RuntimeError("ropeway ended early")
    return seconds


def decode_rate(llm: LLM, prompt: list[int]) -> float:
    """Tokens per second of one stream, the first token apart."""
    first = run_ropeway(llm, [prompt], 1)
    return (NEW_TOKENS - 1) / (run_ropeway(llm, [prompt]) - first)


def read_bandwidth() -> float:
    """Bytes per second at which torch's threads read memory: the best of several passes over 1 GiB."""
    import torch

    data = torch.ones(_BANDWIDTH_BYTES // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, _BANDWIDTH_BYTES / (time.perf_counter() - start))
    return best


def against_transformers(dtype: str, rounds: int, alone: int) -> dict[str, float]:
    """Rounds over the workload; `alone` prompts a round go to transformers one by one."""
    from transformers.utils import logging as transformers_logging

    from engine.llm import LLM

    # Its warning about the generation options of a model without a generation config is of no use here.
    transformers_logging.set_verbosity_error()
    prompts = workload()
    llm = LLM(MODEL, dtype=dtype, max_model_len=1024, enable_prefix_caching=False)  # type: ignore[arg-type]
    model = reference_model(dtype)
    run_ropeway(llm, prompts[:2], 4)
    run_reference(model, prompts[:1])
    times: dict[str, list[float]] = {"ropeway": [], "batch": [], "single": []}
    decode: list[float] = []
    for _ in range(rounds):
        times["ropeway"].append(run_ropeway(llm, prompts))
        times["batch"].append(run_reference(model, prompts))
        singles = sum(run_reference(model, [prompt]) for prompt in prompts[SINGLE_PROMPT : SINGLE_PROMPT + alone])
        times["single"].append(singles / alone * len(prompts))
        decode.append(decode_rate(llm, prompts[SINGLE_PROMPT]))
    produced = NEW_TOKENS * len(prompts)
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {
        "ropeway_tok_s": produced / statistics.median(times["ropeway"]),
        "hf_batch_tok_s": produced / statistics.median(times["batch"]),
        "hf_single_tok_s": produced / statistics.median(times["single"]),
        "ratio_hf_batch": _ratio(times["batch"], times["ropeway"]),
        "ratio_hf_single": _ratio(times["single"], times["ropeway"]),
        "decode_single_tok_s": statistics.median(decode),
        "roofline_fraction": statistics.median(decode) * weight_bytes / read_bandwidth(),
    }


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
