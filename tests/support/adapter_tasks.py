"""Adapters for a model of one small layer, and the processes that load them. Needs no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from shared.protocol import AdapterTargets
from tests.support.ports import free_port
from tests.support.stack import ROOT

#: Inputs and outputs of the only module.
MODULE, SHAPE = "model.layers.0.self_attn.q_proj", (8, 6)
MAX_RANK = 16
TARGETS = AdapterTargets(modules={MODULE: SHAPE}, max_lora_rank=MAX_RANK)
A, B = (f"base_model.model.{MODULE}.lora_{half}.weight" for half in "AB")


def write_adapter(folder: Path, value: float = 1.0, *, rank: int = 4, **config: Any) -> Path:
    """A folder as PEFT would save it; `value` tells contents apart."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    write_tensors(folder, {A: np.full((rank, SHAPE[0]), value), B: np.full((SHAPE[1], rank), value)})
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Replace a folder's weights."""
    arrays = {name: np.asarray(array, dtype=np.float32) for name, array in tensors.items()}
    save_file(arrays, folder / "adapter_model.safetensors")


class TasksProcess:
    """A tasks process with its log in a file.

    Args:
        program: what runs in place of `python -m tasks`, in Python.
        settings: by name; lists as they are.
    """

    def __init__(self, redis_url: str, log: Path, *, program: str | None = None, **settings: Any) -> None:
        self.port, self.log = free_port(), log
        settings = {"redis_url": redis_url, "tasks_health_port": self.port, "adapter_sweep_s": 0.2, **settings}
        env = {f"ROPEWAY_{k.upper()}": v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
        run = ["-m", "tasks"] if program is None else ["-c", program]
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, *run], cwd=ROOT, env={**os.environ, **env}, stdout=out, stderr=out
            )

    def wait_ready(self, timeout: float = 150) -> None:
        """Until it answers /ready. Raises RuntimeError with its log where it does not in time."""
        until = time.monotonic() + timeout
        while time.monotonic() < until and self.popen.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(self.log.read_text(errors="replace")[-4000:])

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Signal it and wait; the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        return self.popen.wait(90)


@contextmanager
def tasks(redis_url: str, folder: Path, **settings: Any) -> Iterator[TasksProcess]:
    """A tasks process that may load from `folder/roots` and keeps adapters in `folder/store`."""
    (folder / "roots").mkdir(exist_ok=True)
    values = {"adapter_roots": [str(folder / "roots")], "adapter_store": str(folder / "store"), **settings}
    process = TasksProcess(redis_url, folder / "tasks.log", **values)
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop(signal.SIGKILL)
