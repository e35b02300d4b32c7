"""A pool under fire: clients with a seed, real processes, disturbances at random moments; judged by what clients saw.

    python -m benchmarks.chaos [--quick] [--seed N] [--jobs N] [--disturbances N] [--kinds kill_worker,...]
    python -m benchmarks.chaos --engine model --jobs 60 --disturbances 10 --kinds kill_worker [--deterministic]
        [--dtype float32|bfloat16]

Gateways, workers and a Redis with an append-only file are processes; each of ours is behind a proxy of its own. Workers
are killed, paused past their lease, drained, hurried, and hang; gateways are killed and drained; connections are killed
and cut, networks fall silent; Redis is killed and starts from its file, stands still, is full; the pool is paused;
adapters' names are given other content or taken away under running jobs, and their store cannot be read for a while.
Clients stream, wait, follow, cancel, leave and come back. Every answer is compared with that of an undisturbed run: a
simulated engine's is known, a model's is run.

Exit code 1 where anything is lost, missing, doubled, fenced or different, where anything is left over in Redis, or
where a process ended that nobody had told to. Without `--deterministic` a model's answers may be different: the share
that is the same is `match_rate`, and among those that a second worker took up `resumed_match_rate`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.support.chaos.run import Config, Report, describe, plan_of, record, run

#: Faults that are printed.
_SHOWN = 40


def main(
    quick: Annotated[bool, typer.Option(help="about a minute: 120 jobs, 14 disturbances")] = False,
    seed: Annotated[int, typer.Option(help="the same orders and the same disturbances")] = 1,
    jobs: Annotated[int | None, typer.Option(help="orders of clients; unset: 1000")] = None,
    disturbances: Annotated[int | None, typer.Option(help="unset: 100")] = None,
    kinds: Annotated[str, typer.Option(help="of disturbances, joined by commas; empty: all")] = "",
    engine: Annotated[str, typer.Option(help="sim or model")] = "sim",
    deterministic: Annotated[bool, typer.Option(help="of a model: every text must be the same again")] = False,
    dtype: Annotated[str, typer.Option(help="of a model: auto, float32 or bfloat16")] = "auto",
    clients: Annotated[int | None, typer.Option(help="orders at the same time")] = None,
    adapters: Annotated[int, typer.Option(help="names of adapters; 0: none")] = 16,
    appendfsync: Annotated[str, typer.Option(help="of Redis: no, everysec (may lose on a busy disk) or always")] = "no",
    verbose: Annotated[bool, typer.Option(help="print each disturbance, keep the logs")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Run, judge, print."""
    config = Config(
        seed=seed,
        jobs=jobs or (120 if quick else 1000),
        disturbances=disturbances if disturbances is not None else (14 if quick else 100),
        kinds=tuple(kind for kind in kinds.split(",") if kind),
        adapters=adapters,
        appendfsync=appendfsync,
        keep_logs=verbose,
    )
    if engine == "model":
        config = dataclasses.replace(
            config,
            engine="model",
            deterministic=deterministic,
            dtype=dtype,
            workers=2,
            gateways=1,
            clients=6,
            tokens=(16, 48),
            lease_s=5.0,
            grace_s=2.0,
            step_timeout_s=60.0,
            patience_s=300.0,
            alone=0.0,
        )
    elif engine != "sim":
        raise typer.BadParameter("engine: sim or model")
    if clients is not None:
        config = dataclasses.replace(config, clients=clients)
    report = asyncio.run(_run(config))
    if verbose:
        _tell(report)
    _show(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.figures, indent=2) + "\n", "utf-8")
    sys.exit(0 if report.ok else 1)


async def _run(config: Config) -> Report:
    plan = plan_of(config)
    return await run(config, plan, await record(config, plan) if config.engine == "model" else None)


def _tell(report: Report) -> None:
    for hit in sorted(report.hits, key=lambda hit: hit.at):
        went_on = " ".join(f"{seconds:.2f}" for seconds in sorted(hit.went_on.values()))
        timed = ", alone" if hit.timed else ""
        print(f"{hit.at - report.began:7.2f} {hit.kind} {hit.victim}, {len(hit.held)} jobs{timed}: {went_on}")


def _show(report: Report) -> None:
    console = Console()
    table = Table("disturbance", "times", "jobs hit", "s until they went on, p50 / max (undisturbed by others)")
    for row in describe(report):
        table.add_row(*row)
    console.print(table)
    figures = Table("figure", "value", title="benchmarks.chaos")
    for name, value in report.figures.items():
        figures.add_row(name, f"{value:g}" if isinstance(value, int) else f"{value:.2f}")
    console.print(figures)
    console.print(", ".join(f"{name} {count}" for name, count in report.counts.items()), highlight=False)
    for problem in [*map(str, report.faults[:_SHOWN]), *report.leftovers[:_SHOWN], *report.crashes]:
        console.print(problem, markup=False, highlight=False)
    console.print(f"command: python -m benchmarks.chaos {' '.join(sys.argv[1:])}", style="dim", highlight=False)


if __name__ == "__main__":
    typer.run(main)
