"""Ropeway and its peers behind one interface: load, complete some prompts, be held still."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peer_process import PeerError, ScriptChild, environment

#: Free-standing figures of an engine in one round: output tokens per second of the batch and of one stream after its
#: first token, and milliseconds to that stream's first token.
BATCH, SINGLE, TTFT = "tok_s", "single_tok_s", "ttft_ms"
#: Where Debian and others keep shared libraries, tried behind the environment's own folder.
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True)
class Work:
    """What every engine has to do.

    Attributes:
        prompts: token ids.
        new_tokens: for each prompt, whatever the end-of-sequence token says.
        single: number of the prompt that runs alone.
        repeats: how often the single stream runs in a round; the median counts.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    single: int = 4
    repeats: int = 3

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError("a workload needs prompts, and tokens in each")
        if not 0 <= self.single < len(self.prompts):
            raise ValueError(f"a workload needs at least {self.single + 1} prompts")
        if self.new_tokens < 2:
            raise ValueError("a workload needs at least 2 new tokens")

    @property
    def output_tokens(self) -> int:
        """Of the whole batch."""
        return len(self.prompts) * self.new_tokens

    @property
    def single_length(self) -> int:
        """Tokens of the prompt that runs alone."""
        return len(self.prompts[self.single])

    @property
    def mean_length(self) -> int:
        """Tokens of a prompt."""
        return round(sum(map(len, self.prompts)) / len(self.prompts))


def read_workload(path: Path) -> list[list[int]]:
    """Prompts from a JSON file of lists of token ids.

    Raises:
        ValueError: it is something else.
    """
    prompts = json.loads(path.read_text("utf-8"))
    if not isinstance(prompts, list) or not all(
        isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt)
        for prompt in prompts
    ):
        raise ValueError(f"{path}: not a list of lists of token ids")
    return prompts


class Contender(Protocol):
    """An engine that is ready to be measured. It is held still until it is asked."""

    name: str
    version: str

    def batch(self) -> float:
        """Seconds for all prompts at once."""

    def single(self) -> tuple[float, float]:
        """Of the single stream: seconds to the first token, and seconds for the tokens after it."""

    def close(self) -> None:
        """End it."""


def measure(contender: Contender, work: Work) -> dict[str, float]:
    """One round of one engine."""
    seconds = contender.batch()
    firsts, rests = zip(*(contender.single() for _ in range(work.repeats)), strict=True)
    return {
        BATCH: work.output_tokens / seconds,
        SINGLE: (work.new_tokens - 1) / _median(rests),
        TTFT: 1e3 * _median(firsts),
    }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


class Scripted:
    """An engine that one of our scripts drives under its own Python."""

    def __init__(self, name: str, child: ScriptChild, work: Work) -> None:
        self.name, self.child, self._work = name, child, work
        self.version = str(child.ready["version"])
        self.child.hold()

    def warm_up(self) -> None:
        """Let it see the whole batch once, so that nothing is compiled or allocated later."""
        self.batch()
        self.single()

    def batch(self) -> float:
        return self._run([(range(len(self._work.prompts)), self._work.new_tokens)])[0]

    def single(self) -> tuple[float, float]:
        first, whole = self._run([([self._work.single], 1), ([self._work.single], self._work.new_tokens)])
        return first, whole - first

    def close(self) -> None:
        self.child.close()

    def _run(self, commands: Sequence[tuple[Sequence[int], int]]) -> list[float]:
        self.child.go_on()
        try:
            # Untimed: what was held still has cold caches and sleeping threads.
            self._ask([self._work.single], 2)
            return [self._ask(prompts, new_tokens) for prompts, new_tokens in commands]
        finally:
            self.child.hold()

    def _ask(self, prompts: Sequence[int], new_tokens: int) -> float:
        return float(self.child.ask({"prompts": list(prompts), "new_tokens": new_tokens})["seconds"])


@dataclass
class LlamaCpp:
    """llama.cpp's own benchmarks on the same volume: as many prompts, all of the mean length, and the single stream.

    Each run is a process of its own, which warms up by itself. Its prompts are random tokens, its samples are not
    drawn; loading is not in the figures.

    Attributes:
        bench: `llama-bench`; `llama-batched-bench` lies beside it.
        model: a GGUF file.
    """

    bench: Path
    model: Path
    work: Work
    threads: int
    name: str = "llamacpp"
    version: str = field(default="llama.cpp", init=False)

    def __post_init__(self) -> None:
        self._batched = self.bench.with_name("llama-batched-bench")
        if not self._batched.is_file():
            raise PeerError(f"llamacpp: there is no {self._batched.name} beside {self.bench.name}")

    def warm_up(self) -> None:
        """One run of the short benchmark, which says the version too."""
        row = self._bench("-p", "16", "-n", "0")
        self.version = f"llama.cpp build {row['build_number']} ({row['build_commit']})"

    def batch(self) -> float:
        work, length = self.work, self.work.mean_length
        context = len(work.prompts) * (length + work.new_tokens)
        options = {"-c": context, "-npp": length, "-ntg": work.new_tokens, "-npl": len(work.prompts)}
        threads = {"-t": self.threads, "-tb": self.threads, "--output-format": "jsonl"}
        args = [str(item) for pair in (options | threads).items() for item in pair]
        row = last_json_line(self._output([str(self._batched), "-m", str(self.model), *args]))
        return float(row["t"])

    def single(self) -> tuple[float, float]:
        length, rest = self.work.single_length, self.work.new_tokens - 1
        prefill = self._bench("-p", str(length), "-n", "0")
        decode = self._bench("-p", "0", "-n", str(rest), "-d", str(length))
        return length / float(prefill["avg_ts"]), rest / float(decode["avg_ts"])

    def close(self) -> None:
        """There is nothing between the runs."""

    def _bench(self, *args: str) -> dict[str, Any]:
        common = ["-m", str(self.model), "-t", str(self.threads), "-r", "1", "-o", "jsonl"]
        return last_json_line(self._output([str(self.bench), *common, *args]))

    def _output(self, args: list[str]) -> str:
        done = subprocess.run(args, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerError(f"llamacpp: {Path(args[0]).name} ended with {done.returncode}\n{done.stderr[-3000:]}")
        return done.stdout


def last_json_line(text: str) -> dict[str, Any]:
    """The last line that is a JSON object.

    Raises:
        PeerError: there is none.
    """
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            row: dict[str, Any] = json.loads(line)
            return row
    raise PeerError(f"no line of JSON in {text[-500:]!r}")


def vllm_environment(python: str, threads: int) -> Mapping[str, str]:
    """What vLLM's own guide sets for a CPU: all cores bound, and its OpenMP and tcmalloc preloaded where they are."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": core_range(threads),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    folders = [Path(python).absolute().parents[1] / "lib", *map(Path, _LIBRARY_FOLDERS)]
    found = [_first(folders, name) for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")]
    preloads = ":".join(str(path) for path in found if path is not None)
    return settings | ({"LD_PRELOAD": preloads} if preloads else {})


def core_range(threads: int) -> str:
    """The first so many cores that this process may use, as a list such as `0,1`."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))


def _first(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def executable(path: str) -> str:
    """An absolute path of what may be run.

    Raises:
        ValueError: there is nothing of that kind.
    """
    found = shutil.which(path)
    if found is None:
        raise ValueError(f"{path}: not an executable file")
    # Not resolved: an environment's Python is a link, and its place says which environment it is.
    return os.path.abspath(found)
