"""What only a GPU can show, in one command: `python -m benchmarks.gpu_check`, under eight minutes on one card.

Every Triton kernel is compared with float64 and then timed, second-level cache flushed, against the bytes that it must
move or the operations that it must do at the rates that this very card was measured to have. Then whole passes on
random weights of the shapes of Llama 1B and 8B. A table, and `gpu_check.json`; the exit code says if all was right.

Each section is a process of its own, so that one which dies takes no other with it.
`--device cpu --tiny` goes the same ways in Triton's interpreter, in this process; its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.gpu.measure import Row

#: Sections of kernels and of whole passes, the most important first, and the seconds after which none is begun.
KERNELS = ("elementwise", "attention", "adapters", "sampling")
ENGINES = ("1b", "8b")
BUDGET_S, SECTION_S = 400.0, 150.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; answers the exit code."""
    options = _parse(arguments)
    if options.section is not None:
        rows = list(_section(options.section, options.device, options.tiny))
        options.json.write_text(json.dumps([asdict(row) for row in rows]), "utf-8")
        return 0
    sections = options.only or [*KERNELS, *ENGINES]
    began = time.monotonic()
    rows = []
    for name in sections:
        if time.monotonic() - began > BUDGET_S:
            rows.append(_failed(name, "left out: the time is up"))
        elif options.tiny:
            rows += _section(name, options.device, True)
        else:
            rows += _in_a_process(name, options.device)
    figures = {"machine": _machine(options.device), "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    _print(rows, figures["machine"], time.monotonic() - began)
    return 1 if any(row.problem is not None for row in rows) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and time every kernel and whole passes on one GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs")
    parser.add_argument("--only", action="append", choices=[*KERNELS, *ENGINES], help="a section; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="file for the figures")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu runs in Triton's interpreter: it needs --tiny")
    return options


def _section(name: str, device: str, tiny: bool) -> Iterator[Row]:
    """The rows of one section, computed in this process."""
    import torch

    from benchmarks.gpu.measure import Place, ceilings_of, measured
    from kernels.ops import ops_for

    if device == "cuda" and not torch.cuda.is_available():
        yield _failed(name, "torch finds no CUDA device")
        return
    torch.manual_seed(0)
    place = Place(torch.device(device), tiny)
    ops = ops_for(device, kernels="triton")
    ceilings = ceilings_of(place)
    yield _ceilings(name, ceilings.bytes_s, ceilings.flops_s)
    if name in ENGINES:
        from benchmarks.gpu.engine import rows

        try:
            yield from rows(name, place, ops, ceilings)
        except Exception as error:  # noqa: BLE001 - what was measured before is kept, and the table tells the error
            yield _failed(name, f"{type(error).__name__}: {error}".splitlines()[0][:300])
    else:
        yield from measured(name, place, ceilings, importlib.import_module(f"benchmarks.gpu.{name}").cases(place, ops))


def _in_a_process(name: str, device: str) -> list[Row]:
    from benchmarks.gpu.measure import Row

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", device, "--section", name]
        try:
            ended = subprocess.run(
                [*command, "--json", str(file)], capture_output=True, text=True, check=False, timeout=SECTION_S
            )
        except subprocess.TimeoutExpired:
            return [_failed(name, f"not done after {SECTION_S:.0f} s")]
        if ended.returncode != 0 or not file.exists():
            last = ended.stderr.strip().splitlines()[-1:] or ["nothing on standard error"]
            return [_failed(name, f"ended with {ended.returncode}: {last[0][:300]}")]
        return [Row(**row) for row in json.loads(file.read_text("utf-8"))]


def _failed(section: str, problem: str) -> Row:
    from benchmarks.gpu.measure import Row

    return Row(section, section, problem)


def _ceilings(section: str, bytes_s: float, flops_s: float) -> Row:
    from benchmarks.gpu.measure import Row

    return Row(section, "measured ceilings", figures={"gb_s": bytes_s / 1e9, "tflop_s": flops_s / 1e12})


def _machine(device: str) -> dict[str, str]:
    import torch
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else platform.machine()
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _shown(key: str, figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:.0%}" if key == "share" else f"{figure:,.1f}"


def _print(rows: list[Row], machine: dict[str, str], taken: float) -> None:
    table = Table(title="benchmarks.gpu_check")
    columns = {"us": "µs", "gb_s": "GB/s", "tflop_s": "TFLOP/s", "tokens_s": "tokens/s", "share": "of the ceiling"}
    table.add_column("what", no_wrap=True)
    table.add_column("right")
    for title in columns.values():
        table.add_column(title, justify="right")
    section = None
    for row in rows:
        if row.section != section:
            table.add_section()
            section = row.section
        cells = [_shown(key, row.figures.get(key)) for key in columns]
        table.add_row(row.name, row.problem or "yes", *cells)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{label} {text}" for label, text in machine.items()), f"{taken:.0f} s", markup=False)


if __name__ == "__main__":
    sys.exit(main())
