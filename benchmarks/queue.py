"""What gateway, Redis and worker process cost beside `LLM.generate` on the same work.

    python -m benchmarks.queue [--quick] [--json FILE] [--dtype bfloat16]

Three comparisons, in alternating runs of one call. Throughput: 32 prompts, 64 new tokens each, as 32 concurrent SSE
streams over HTTP, and as one `LLM.generate` call. First token, simulated engine of zero cost: one stream at a time
over HTTP against the same engine in this process; what is added is all that is not the engine, HTTP and SSE among it.
First token, real model: the same against `LLM.generate` of one token. The load generator shares the machine's cores
with what it measures, so the ratio holds its cost too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.common import MODEL, report, workload
from benchmarks.first_token import first_tokens
from benchmarks.streams import quantile
from shared.sampling import SamplingParams
from tests.support.stack import Stack

NEW_TOKENS = 64
#: Parts that first tokens are measured in, by turns.
_TURNS = 4


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """One SSE stream to its end."""
    tail = b""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for chunk in response.aiter_raw():
            tail = (tail + chunk)[-64:]
    if b"[DONE]" not in tail:
        raise RuntimeError("the stream ended without [DONE]")


def body(prompt: list[int], tokens: int, streamed: bool) -> dict[str, Any]:
    return {
        "model": MODEL,
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


def simulated_first_token(prompt: list[int], count: int) -> dict[str, list[float]]:
    """Seconds to the first token of an engine that costs nothing: over HTTP, and in this process."""
    from engine.request import EngineRequest
    from engine.sim import SimConfig, SimEngine

    engine = SimEngine(SimConfig(step_ms=0))
    prompt = [token % 400 for token in prompt]

    def direct(number: int) -> float:
        start = time.perf_counter()
        engine.add(EngineRequest(str(number), prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        while not any(output.finished for output in engine.step()):
            pass
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"engine": [], "http": []}
    with Stack(engine="sim", sim_step_ms=0) as stack:
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        first_tokens(stack.gateway_port, "sim", prompt, 20)
        for _ in range(_TURNS):
            times["engine"] += [direct(number) for number in range(count // _TURNS)]
            times["http"] += first_tokens(stack.gateway_port, "sim", prompt, count // _TURNS)
    return times


def added(times: dict[str, list[float]], base: str, name: str) -> dict[str, float]:
    """Milliseconds that HTTP adds to the median and to the slowest hundredth."""
    return {
        f"{name}_{label}": 1e3 * (quantile(times["http"], share) - quantile(times[base], share))
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


def main(
    quick: Annotated[bool, typer.Option(help="one run")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of weights and KV cache")] = "bfloat16",
) -> None:
    """Measure and print."""
    from engine.llm import LLM

    runs, firsts, simulated = (1, 8, 200) if quick else (5, 40, 1000)
    prompts = workload()
    llm = LLM(model=MODEL, dtype=dtype, max_num_seqs=64, enable_prefix_caching=False)
    tokens = [{"prompt_token_ids": p} for p in prompts]
    many = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def offline(items: list[dict[str, list[int]]], params: SamplingParams) -> float:
        start = time.perf_counter()
        llm.generate(items, params, use_tqdm=False)
        return time.perf_counter() - start

    whole: dict[str, list[float]] = {"llm": [], "streamed": [], "unstreamed": []}
    first: dict[str, list[float]] = {"llm": [], "http": []}
    with Stack(model=MODEL, dtype=dtype, max_num_seqs=64, enable_prefix_caching=False) as stack:
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        offline(tokens[:4], one)
        asyncio.run(run_http(stack.url, prompts[:4], True))
        for _ in range(runs):
            whole["llm"].append(offline(tokens, many))
            whole["streamed"].append(asyncio.run(run_http(stack.url, prompts, True)))
            whole["unstreamed"].append(asyncio.run(run_http(stack.url, prompts, False)))
        for _ in range(_TURNS):
            first["llm"] += [offline([tokens[4]], one) for _ in range(firsts // _TURNS)]
            first["http"] += first_tokens(stack.gateway_port, MODEL, prompts[4], firsts // _TURNS)

    produced = NEW_TOKENS * len(prompts)
    figures = {f"{name}_tok_s": produced / statistics.median(times) for name, times in whole.items()}
    figures["throughput_ratio"] = statistics.median(a / b for a, b in zip(whole["llm"], whole["streamed"], strict=True))
    figures["throughput_ratio_unstreamed"] = statistics.median(
        a / b for a, b in zip(whole["llm"], whole["unstreamed"], strict=True)
    )
    figures |= added(simulated_first_token(prompts[4], simulated), "engine", "ttft_added_ms")
    figures |= added(first, "llm", "ttft_added_model_ms")
    figures["ttft_llm_ms_p50"] = 1e3 * quantile(first["llm"], 0.5)
    report("queue", figures, dtype=dtype, json_file=json_file)


if __name__ == "__main__":
    typer.run(main)
