"""What gateway, Redis and worker process cost beside `LLM.generate` on the same work.

    python -m benchmarks.queue [--quick] [--json FILE] [--dtype bfloat16]

Two comparisons, in alternating runs of one call. Throughput: 32 prompts, 64 new tokens each, as 32 concurrent SSE
streams over HTTP, and as one `LLM.generate` call. First token: one stream at a time against `LLM.generate` of one
token. The load generator shares the machine's cores with what it measures, so the ratio holds its cost too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.common import report, workload
from tests.support.stack import Stack

NEW_TOKENS = 64


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    """One SSE stream to its end; seconds to the first event that holds text."""
    start = time.perf_counter()
    first = 0.0
    tail = b""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for chunk in response.aiter_raw():
            first = first or time.perf_counter() - start
            tail = (tail + chunk)[-64:]
    if b"[DONE]" not in tail:
        raise RuntimeError("the stream ended without [DONE]")
    return first


def body(prompt: list[int], tokens: int, streamed: bool) -> dict[str, Any]:
    return {
        "model": "smollm2-135m-instruct",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": streamed,
    }


async def run_http(url: str, prompts: list[list[int]], streamed: bool) -> float:
    """Seconds for all prompts at once."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start = time.perf_counter()
        if streamed:
            await asyncio.gather(*(stream(client, body(p, NEW_TOKENS, True)) for p in prompts))
        else:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body(p, NEW_TOKENS, False)) for p in prompts)
            )
            for answer in answers:
                answer.raise_for_status()
        return time.perf_counter() - start


async def run_first_token(url: str, prompt: list[int], count: int) -> list[float]:
    """Seconds to the first token, one stream at a time."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return [await stream(client, body(prompt, 1, True)) for _ in range(count)]


def main(
    quick: Annotated[bool, typer.Option(help="one run")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of weights and KV cache")] = "bfloat16",
) -> None:
    """Measure and print."""
    from engine.llm import LLM
    from shared.sampling import SamplingParams

    runs, firsts = (1, 8) if quick else (5, 40)
    prompts = workload()
    llm = LLM(model="smollm2-135m-instruct", dtype=dtype, max_num_seqs=64, enable_prefix_caching=False)
    tokens = [{"prompt_token_ids": p} for p in prompts]
    many = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def offline(items: list[dict[str, list[int]]], params: SamplingParams) -> float:
        start = time.perf_counter()
        llm.generate(items, params, use_tqdm=False)
        return time.perf_counter() - start

    whole: dict[str, list[float]] = {"llm": [], "streamed": [], "unstreamed": []}
    first: dict[str, list[float]] = {"llm": [], "http": []}
    with Stack(model="smollm2-135m-instruct", dtype=dtype, max_num_seqs=64, enable_prefix_caching=False) as stack:
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        offline(tokens[:4], one)
        asyncio.run(run_http(stack.url, prompts[:4], True))
        for _ in range(runs):
            whole["llm"].append(offline(tokens, many))
            whole["streamed"].append(asyncio.run(run_http(stack.url, prompts, True)))
            whole["unstreamed"].append(asyncio.run(run_http(stack.url, prompts, False)))
        for _ in range(4):
            first["llm"] += [offline([tokens[4]], one) for _ in range(firsts // 4)]
            first["http"] += asyncio.run(run_first_token(stack.url, prompts[4], firsts // 4))

    produced = NEW_TOKENS * len(prompts)
    figures = {f"{name}_tok_s": produced / statistics.median(times) for name, times in whole.items()}
    figures["throughput_ratio"] = statistics.median(a / b for a, b in zip(whole["llm"], whole["streamed"], strict=True))
    figures["throughput_ratio_unstreamed"] = statistics.median(
        a / b for a, b in zip(whole["llm"], whole["unstreamed"], strict=True)
    )
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        figures[f"ttft_added_ms_{name}"] = 1e3 * (quantile(first["http"], share) - quantile(first["llm"], share))
    figures["ttft_llm_ms_p50"] = 1e3 * quantile(first["llm"], 0.5)
    report("queue", figures, dtype=dtype, json_file=json_file)


def quantile(values: list[float], share: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    typer.run(main)
