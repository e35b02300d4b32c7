"""What the prefix cache, chunked prefill, sampling options and deterministic mode do to the engine's speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from benchmarks.common import corpus, workload
from benchmarks.engines import Engines
from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

NEW_TOKENS = 64
SYSTEM_PROMPT = 200
#: Tokens of the prompt that arrives while others decode; and steps before it, from which the plain one is taken.
LONG_PROMPT = 1700
PLAIN_STEPS = 16

#: Every option at once, none of which ends a row early.
ALL_OPTIONS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {28: 1.5, 30: -2.0, 253: 0.5},
    "bad_words": ["license", " the License", "Apache"],
    "stop": ["\n\n\n\n", "<never>"],
    "seed": 11,
    "logprobs": 5,
    "ignore_eos": True,
}


def greedy(tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def seconds_of(engine: Engine, prompts: Iterable[list[int]], params: SamplingParams) -> float:
    """Until all of them, added at once, have ended.

    Raises:
        RuntimeError: an answer is not as long as it should be.
    """
    from engine.request import EngineRequest

    requests = [EngineRequest(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
    completed = 0
    while engine.has_work():
        completed += sum(o.usage.completion_tokens for o in engine.step() if o.finished)
    seconds = time.perf_counter() - start
    if completed != len(requests) * (params.max_tokens or 0):
        raise RuntimeError(f"{completed} tokens came from {len(requests)} requests of {params.max_tokens}")
    return seconds


def prefix_ttft(engines: Engines, requests: int) -> dict[str, float]:
    """Time to first token behind a common system prompt, one request after another: cache off, and warm."""
    ids = corpus()
    system, rest = ids[:SYSTEM_PROMPT], ids[SYSTEM_PROMPT:]
    questions = [system + rest[20 * index : 20 * index + 8 + index % 12] for index in range(requests)]
    off, on = engines.make(enable_prefix_caching=False), engines.make(enable_prefix_caching=True)
    for engine in (off, on):
        seconds_of(engine, [[*system, 1]], greedy(1))
    pairs = [tuple(seconds_of(engine, [question], greedy(1)) for engine in (off, on)) for question in questions]
    return {
        "prefix_ttft_ratio": statistics.median(cold / warm for cold, warm in pairs),
        "prefix_off_ttft_ms": 1e3 * statistics.median(cold for cold, _ in pairs),
        "prefix_warm_ttft_ms": 1e3 * statistics.median(warm for _, warm in pairs),
    }


def longest_gaps(engines: Engines, streams: Iterable[int], rounds: int, threshold: int | None) -> dict[str, float]:
    """Medians of `longest_gap` for each number of streams; `longest_gap_steps` is that of the worst."""
    figures: dict[str, float] = {}
    for count in streams:
        found = [longest_gap(engines, count, threshold) for _ in range(rounds)]
        figures |= {f"{name}_{count}": statistics.median(each[name] for each in found) for name in found[0]}
    worst = max(value for name, value in figures.items() if name.startswith("longest_gap_steps"))
    return {"longest_gap_steps": worst} | figures


def longest_gap(engines: Engines, streams: int, threshold: int | None) -> dict[str, float]:
    """Streams decode when a long prompt arrives: the longest time between two tokens of any of them until its first
    token is there, over the median step before."""
    from engine.request import EngineRequest

    settings: dict[str, Any] = {}
    if threshold is not None:
        settings = {"long_prefill_token_threshold": threshold, "prefill_pace": None}
    engine = engines.make(num_blocks=1024, enable_prefix_caching=False, **settings)
    for index, prompt in enumerate(workload(count=streams)):
        engine.add(EngineRequest(str(index), prompt, greedy(1024)))
    names, step = settled(engine, streams)
    late = EngineRequest("long", corpus()[:LONG_PROMPT], greedy(1))
    arrival = time.perf_counter()
    heard = dict.fromkeys(names, arrival)
    engine.add(late)
    longest, decoded, waiting = 0.0, 0, True
    while waiting:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id == "long":
                waiting = not output.choices
            elif output.choices:
                longest = max(longest, now - heard[output.request_id])
                heard[output.request_id] = now
                decoded += 1
    seconds = time.perf_counter() - arrival
    return {
        "longest_gap_steps": longest / step,
        "long_ttft_s": seconds,
        "plain_step_ms": 1e3 * step,
        "gap_tok_s": (LONG_PROMPT + decoded) / seconds,
    }


def settled(engine: Engine, streams: int) -> tuple[set[str], float]:
    """Step until so many streams decode; their names, and the median seconds of the steps that follow."""
    names: set[str] = set()
    while len(names) < streams:
        names |= {output.request_id for output in engine.step() if output.choices}
    plain = []
    for _ in range(PLAIN_STEPS):
        start = time.perf_counter()
        engine.step()
        plain.append(time.perf_counter() - start)
    return names, statistics.median(plain)


def sampling(engines: Engines, prompts: list[list[int]], rounds: int, tokens: int) -> dict[str, float]:
    """The workload with every option on every row over greedy, alternating."""
    engine = engines.make(enable_prefix_caching=False)
    full = SamplingParams(**ALL_OPTIONS, max_tokens=tokens, min_tokens=tokens)
    seconds_of(engine, prompts[:2], full)

    def once() -> float:
        plain = seconds_of(engine, prompts, greedy(tokens))
        return seconds_of(engine, prompts, full) / plain

    return {"sampling_ratio": statistics.median(once() for _ in range(rounds))}


def deterministic(
    engines: Engines, other: Engines, prompts: list[list[int]], rounds: int, tokens: int
) -> dict[str, float]:
    """Rates of deterministic mode, `other`, over those of the default: a batch, and one stream."""
    plain, fixed = (each.make(enable_prefix_caching=False) for each in (engines, other))
    for engine in (plain, fixed):
        seconds_of(engine, prompts[:2], greedy(2))

    def once(some: list[list[int]]) -> float:
        return seconds_of(plain, some, greedy(tokens)) / seconds_of(fixed, some, greedy(tokens))

    return {
        "deterministic_ratio": statistics.median(once(prompts) for _ in range(rounds)),
        "deterministic_single_ratio": statistics.median(once(prompts[4:5]) for _ in range(rounds)),
    }
