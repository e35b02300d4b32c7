"""What adapters cost: any number of them in a batch against the base model, many more than there are slots, loading.

    python -m benchmarks.lora [--quick] [--json FILE] [--dtype bfloat16] [--rank 16] [--slots 8]

Batches: the workload's 32 prompts over 1, 4 and 8 adapters of rank 16 on all linear layers, all in memory, against the
base model, in turns: `ratio_<adapters>`, at least 0.85. Many: requests whose adapters are drawn from 200 with a Zipf
distribution, 8 slots and 32 in memory: `ratio_zipf`, at least 0.75. Beside it `ratio_zipf_bound`, what adapters that
cost nothing would reach: each has one of the slots once, for the length of a sequence, so that on average no more than
`requests * slots / adapters` run at once, and the base model with so many is measured. Loading: 8 streams decode with
one adapter when a request of another arrives, which has to be read: the longest time between two tokens over the median
step before, `load_gap_steps`, at most 2. Parity: log probabilities against PEFT's on the same weights, float32, plain,
rsLoRA and pattern adapters and the base model in one batch: `parity_max_diff`, at most 1e-3.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.adapters import LINEAR, write_adapter
from benchmarks.common import MODEL, report, workload
from benchmarks.engine_parts import settled
from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.models.config import ModelConfig

SLOTS, IN_MEMORY = 8, 32
REGISTERED = 200
STREAMS = 8
PARITY: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "pattern": {"alpha_pattern": {"q_proj": 64, "down_proj": 3}},
}


def greedy(tokens: int, **more: Any) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def load(dtype: str, **options: Any) -> LLM:
    """The model with slots."""
    from engine.llm import LLM

    settings = {"max_loras": SLOTS, "max_cpu_loras": IN_MEMORY, "max_lora_rank": 16, "max_num_seqs": 64}
    return LLM(MODEL, dtype=dtype, enable_lora=True, enable_prefix_caching=False, **(settings | options))  # type: ignore[arg-type]


def write_all(folder: Path, config: ModelConfig, count: int, rank: int) -> list[Any]:
    """So many adapters of one rank, as requests."""
    from ropeway import LoRARequest

    return [LoRARequest(f"a{n}", 0, str(write_adapter(folder / f"a{n}", config, n, rank=rank))) for n in range(count)]


def seconds(llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[str | None], tokens: int) -> float:
    """Until all have ended."""
    items = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(items, greedy(tokens), use_tqdm=False, lora_request=adapters)
    passed = time.perf_counter() - start
    if failed := [output.error for output in outputs if output.error is not None]:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return passed


def batches(llm: LLM, rounds: int, tokens: int) -> dict[str, float]:
    """The workload over some adapters against the base model, in turns."""
    prompts = workload()
    none = [None] * len(prompts)
    figures: dict[str, float] = {}
    for count in (1, 4, 8):
        mix = [f"a{index % count}" for index in range(len(prompts))]
        seconds(llm, prompts, mix, 2)
        found = [seconds(llm, prompts, none, tokens) / seconds(llm, prompts, mix, tokens) for _ in range(rounds)]
        figures[f"ratio_{count}"] = statistics.median(found)
    return figures


def paced(llm: LLM, prompts: Sequence[list[int]], tokens: int, most: int) -> float:
    """Seconds of the base model with so many requests at once."""
    from engine.request import EngineRequest

    engine, left, live = llm._engine, list(enumerate(prompts)), 0
    start = time.perf_counter()
    while left or live:
        while left and live < most:
            index, prompt = left.pop()
            engine.add(EngineRequest(f"paced{index}", prompt, greedy(tokens)))
            live += 1
        live -= sum(output.finished for output in engine.step())
    return time.perf_counter() - start


def zipf(llm: LLM, slots: int, registered: int, requests: int, rounds: int, tokens: int) -> dict[str, float]:
    """Requests over many adapters against the base model, in turns. All are queued at once."""
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(registered)]
    prompts = [prompt for turn in range(-(-requests // 32)) for prompt in workload()][:requests]
    library = llm._engine.library
    assert library is not None
    ratios, bounds, steps, reads, wanted = [], [], [], 0, 0
    for _ in range(rounds):
        mix = [f"a{number}" for number in draw.choices(range(registered), weights, k=requests)]
        base = seconds(llm, prompts, [None] * requests, tokens)
        before = library.reads
        first = llm._engine.stats().steps
        ratios.append(base / seconds(llm, prompts, mix, tokens))
        steps.append(llm._engine.stats().steps - first)
        reads, wanted = reads + library.reads - before, wanted + requests
        bounds.append(base / paced(llm, prompts, tokens, max(1, requests * slots // len(set(mix)))))
    return {
        "ratio_zipf": statistics.median(ratios),
        "ratio_zipf_bound": statistics.median(bounds),
        "zipf_steps": statistics.median(steps),
        "zipf_memory_hit_rate": 1 - reads / wanted,
        "zipf_load_ms": 1e3 * statistics.median(library.load_seconds),
    }


def gap(llm: LLM, adapter: Any) -> dict[str, float]:
    """Streams decode when a request of an adapter arrives that has to be read."""
    from engine.request import EngineRequest

    engine, names = llm._engine, llm._adapters
    known, late = names.resolve("a0"), names.resolve(adapter)
    for index, prompt in enumerate(workload(count=STREAMS)):
        engine.add(EngineRequest(str(index), prompt, greedy(2000), adapter=known))
    request = EngineRequest("late", workload()[4][:8], greedy(2), adapter=late)
    streams, step = settled(engine, STREAMS)
    arrival = time.perf_counter()
    heard = dict.fromkeys(streams, arrival)
    engine.add(request)
    longest, waiting = 0.0, True
    while waiting:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id == "late":
                waiting = not output.choices
            elif output.choices:
                longest, heard[output.request_id] = max(longest, now - heard[output.request_id]), now
    for name in [*heard, "late"]:
        engine.abort(name)
    return {"load_gap_steps": longest / step, "load_ms": 1e3 * (now - arrival)}


def parity(folder: Path, config: ModelConfig) -> dict[str, float]:
    """Log probabilities of prompts and answers against PEFT's, all adapters and the base model in one batch."""
    import torch
    from peft import PeftModel

    from benchmarks.reference import reference_logprobs, reference_model
    from ropeway import LoRARequest

    for seed, (name, options) in enumerate(PARITY.items()):
        write_adapter(folder / name, config, 1000 + seed, rank=16, modules=LINEAR, **options)
    names = [None, *PARITY]
    llm = load("float32")
    requests = [name and LoRARequest(name, 0, str(folder / name)) for name in names]
    items = [{"prompt_token_ids": prompt} for prompt in workload()[: len(names)]]
    outputs = llm.generate(items, greedy(16, logprobs=0, prompt_logprobs=0), use_tqdm=False, lora_request=requests)
    worst = 0.0
    for name, output in zip(names, outputs, strict=True):
        model = reference_model("float32")
        if name is not None:
            model = PeftModel.from_pretrained(model, str(folder / name)).eval()
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        wanted = reference_logprobs(model, tokens)
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        ours = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)])  # type: ignore[index]
        theirs = wanted[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        worst = max(worst, float((ours - theirs).abs().max()))
    return {"parity_max_diff": worst}


def main(
    quick: Annotated[bool, typer.Option(help="one round, fewer tokens and adapters")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of weights and KV cache")] = "bfloat16",
    rank: Annotated[int, typer.Option(help="of the adapters")] = 16,
    slots: Annotated[int, typer.Option(help="most adapters in one batch")] = SLOTS,
) -> None:
    """Measure and print."""
    from engine.loading.resolve import load as load_checkpoint
    from engine.models.config import ModelConfig

    rounds, tokens, registered, requests = (1, 16, 40, 64) if quick else (5, 64, REGISTERED, 256)
    config = ModelConfig.from_hf(load_checkpoint(MODEL).config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = write_all(folder, config, registered, rank)
        llm = load(dtype, max_loras=slots, max_lora_rank=rank)
        llm.set_adapters(adapters)
        figures = batches(llm, rounds, tokens)
        gaps = [gap(llm, adapters[registered - 1 - turn]) for turn in range(rounds)]
        figures |= {name: statistics.median(each[name] for each in gaps) for name in gaps[0]}
        figures |= zipf(llm, slots, registered, requests, 1 if quick else 3, tokens)
        engine: Any = llm._engine
        figures["slot_mb"] = engine._runner._adapters.bytes / slots / 2**20
        figures["adapter_mb"] = next(iter(engine.library._memory.values())).bytes / 2**20
        figures |= parity(folder, config)
    report("lora", figures, dtype=dtype, json_file=json_file)


if __name__ == "__main__":
    typer.run(main)
