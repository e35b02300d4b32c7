"""What the benchmarks share: the workload, and how figures are shown and kept."""

from __future__ import annotations

import json
import platform
import random
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

MODEL = "smollm2-135m-instruct"
PROMPTS = 32
SHORTEST, LONGEST = 32, 256
_PACKAGES = ("ropeway", "torch", "transformers", "tokenizers", "redis")


def corpus(model: str = MODEL) -> list[int]:
    """Ids of the project's own license, some 2,200: the same on every run and machine."""
    from engine.loading.resolve import load_tokenizer

    text = (Path(__file__).parents[1] / "LICENSE").read_text("utf-8")
    return list(load_tokenizer(model).tokenizer.encode(text).ids)


def workload(model: str = MODEL, count: int = PROMPTS) -> list[list[int]]:
    """Prompts of 32 to 256 tokens, cut from the license."""
    ids = corpus(model)
    rng = random.Random(0)
    prompts = []
    for _ in range(count):
        length = rng.randint(SHORTEST, LONGEST)
        start = rng.randrange(len(ids) - length)
        prompts.append(ids[start : start + length])
    return prompts


def report(
    name: str,
    figures: dict[str, float],
    *,
    dtype: str,
    json_file: Path | None = None,
    model: str = MODEL,
    notes: dict[str, str] | None = None,
) -> None:
    """Print the figures as a table with what they depend on, and write them as one flat JSON object if asked to.

    Args:
        notes: further lines behind the table, by label.
    """
    table = Table(title=f"benchmarks.{name}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for figure, value in figures.items():
        table.add_row(figure, shown(value))
    console = Console()
    console.print(table)
    print_conditions(console, dtype=dtype, model=model)
    for label, text in (notes or {}).items():
        console.print(f"{label}: {text}", style="dim", highlight=False, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def shown(value: float) -> str:
    """A figure with the digits that say something."""
    if 0 < abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def print_conditions(console: Console, *, dtype: str, model: str = MODEL) -> None:
    """What the figures depend on."""
    for label, text in _conditions(model, dtype).items():
        console.print(f"{label}: {text}", style="dim", highlight=False, markup=False)


def _conditions(model: str, dtype: str) -> dict[str, str]:
    import torch

    command = " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return {
        "model": f"{model}, {dtype}, {torch.get_num_threads()} threads",
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "versions": f"python {platform.python_version()}, {', '.join(versions)}",
        "command": command,
    }
