"""The engine's speed: against transformers, and what prefix cache, chunks, sampling options, modes and kernels do.

    python -m benchmarks.engine [--quick] [--json FILE] [--dtype bfloat16] [--part sampling --part gap ...]

The workload is 32 prompts of 32 to 256 tokens, 64 new tokens each, EOS ignored. What is compared alternates within a
round; figures are medians over rounds, ratios those of one round. See `engine_transformers`,
`engine_parts` and `engine_kernels`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import report, workload


class Part(StrEnum):
    """What to measure."""

    TRANSFORMERS = "transformers"
    PREFIX = "prefix"
    GAP = "gap"
    SAMPLING = "sampling"
    DETERMINISTIC = "deterministic"
    KERNELS = "kernels"
    NEIGHBOUR = "neighbour"


def main(
    quick: Annotated[bool, typer.Option(help="one round, and less of the work")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    part: Annotated[list[Part] | None, typer.Option(help="measure this; all by default")] = None,
    long_prefill_token_threshold: Annotated[int | None, typer.Option(min=0, help="unset: the engine's own")] = None,
) -> None:
    """Measure and print."""
    from benchmarks import engine_parts as parts
    from benchmarks.engine_kernels import beside_a_neighbour, over_torch
    from benchmarks.engine_transformers import against_transformers
    from benchmarks.engines import Engines

    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("float32 or bfloat16", param_hint="--dtype")
    wanted = part or list(Part)
    rounds, tokens = (1, 16) if quick else (5, parts.NEW_TOKENS)
    prompts = workload()[: 16 if quick else None]
    figures: dict[str, float] = {}
    if Part.TRANSFORMERS in wanted:
        figures |= against_transformers(dtype, rounds, 1 if quick else 4)
    if wanted == [Part.TRANSFORMERS]:
        report("engine", figures, dtype=dtype, json_file=json_file)
        return
    engines = Engines.load(dtype)
    if Part.PREFIX in wanted:
        figures |= parts.prefix_ttft(engines, 8 if quick else 32)
    if Part.GAP in wanted:
        streams = (16,) if quick else (8, 16, 32)
        figures |= parts.longest_gaps(engines, streams, 1 if quick else 3, long_prefill_token_threshold)
    if Part.SAMPLING in wanted:
        figures |= parts.sampling(engines, prompts, rounds, tokens)
    if Part.DETERMINISTIC in wanted:
        figures |= parts.deterministic(engines, Engines.load(dtype, deterministic=True), prompts, rounds, tokens)
    if Part.KERNELS in wanted:
        figures |= over_torch(engines, Engines.load(dtype, cpu_kernels="torch"), prompts, rounds, tokens)
    if Part.NEIGHBOUR in wanted:
        figures |= beside_a_neighbour(engines, prompts, rounds, tokens)
    report("engine", figures, dtype=dtype, json_file=json_file)


if __name__ == "__main__":
    typer.run(main)
