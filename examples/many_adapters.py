"""Twenty LoRA adapters through one worker with four slots: each text is that of its adapter alone.

    .venv/bin/python examples/many_adapters.py                          # starts a server of its own
    .venv/bin/python examples/many_adapters.py http://127.0.0.1:8000    # one that serves SmolLM2-135M, see below

A server of your own is `make serve ARGS="--enable-lora --deterministic"`: texts are compared character by character,
and that they do not depend on what shares a batch is promised with `--deterministic` alone.

The adapters have random weights and are uploaded. All are asked at once and then one by one; meanwhile it is shown how
slots change hands. Exit code 1 where a text is another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save

ADAPTERS, SLOTS, RANK, TOKENS = 20, 4, 8, 24
#: SmolLM2-135M: layers, and inputs and outputs of what is adapted.
LAYERS, MODULES = 30, {"q_proj": (576, 576), "v_proj": (576, 192)}
QUESTION = [{"role": "user", "content": "What is a ropeway?"}]
SHOWN = {
    "ropeway_adapter_slot_fills_total": "slots filled",
    "ropeway_adapters_resident": "in slots",
    "ropeway_adapters_in_memory": "in memory",
    'ropeway_adapter_requests{state="running"}': "requests running",
    'ropeway_adapter_requests{state="waiting"}': "waiting for a slot",
    'ropeway_adapter_requests{state="loading"}': "waiting for memory",
}


def files(seed: int) -> dict[str, tuple[str, bytes]]:
    """An adapter as PEFT would save it."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (inputs, outputs) in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a, b = random.standard_normal((RANK, inputs)) / 24, random.standard_normal((outputs, RANK)) / 8
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": sorted(MODULES)}
    return {
        "config": ("adapter_config.json", json.dumps(config).encode()),
        "weights": ("adapter_model.safetensors", save(tensors)),
    }


async def upload(http: httpx.AsyncClient, name: str, seed: int) -> None:
    """Load an adapter under a name, and wait until it is there."""
    form = {"lora_name": name, "load_inplace": "true"}
    answer = await http.post("/v1/adapters", params={"wait": 120}, data=form, files=files(seed))
    if not answer.is_success or answer.json()["error"]:
        sys.exit(f"{name} was not loaded: {answer.text}")


async def ask(http: httpx.AsyncClient, model: str) -> str:
    """The streamed answer of an adapter."""
    body = {"model": model, "messages": QUESTION, "stream": True, "max_tokens": TOKENS, "temperature": 0}
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if not response.is_success:
            sys.exit(f"{model}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    sys.exit(f"{model}: {chunk['error']['message']}")
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return text


async def watch(http: httpx.AsyncClient, metrics_url: str | None) -> None:
    """Print where adapters are, whenever that has changed."""
    before, began = "", time.monotonic()
    while True:
        if metrics_url is None:
            shown = (await http.get("/v1/adapters")).json()["data"]
            states = [adapter["state"] for adapter in shown]
            now = ", ".join(f"{state} {states.count(state)}" for state in sorted(set(states)))
        else:
            text = re.sub(r'model_name="[^"]*",?', "", (await http.get(metrics_url)).text).replace("{}", "")
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("ropeway_adapter"))
            now = ", ".join(f"{label} {float(values[name]):.0f}" for name, label in SHOWN.items())
        if now != before:
            print(f"{time.monotonic() - began:6.1f} s  {now}")
        before = now
        await asyncio.sleep(0.2)


async def main(url: str, metrics_url: str | None) -> int:
    """Load, ask, compare; answers the exit code."""
    names = [f"random-{number}" for number in range(ADAPTERS)]
    timeout = httpx.Timeout(300)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as http:
        for seed, name in enumerate(names):
            await upload(http, name, seed)
        print(f"{len(names)} adapters are loaded; now all of them at once:")
        watching = asyncio.create_task(watch(http, metrics_url))
        together = await asyncio.gather(*(ask(http, name) for name in names))
        await asyncio.sleep(1.0)  # the worker's figures are up to half a second old
        watching.cancel()
        print("and one by one:")
        alone = [await ask(http, name) for name in names]
        for name in names:
            await http.delete(f"/v1/adapters/{name}")
    for name, text in zip(names, alone, strict=True):
        print(f"  {name:10} {text!r}")
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    print(f"{same} of {len(names)} texts are those of their adapters alone; {len(set(alone))} of them differ")
    return 0 if same == len(names) else 1


@contextmanager
def server() -> Iterator[tuple[str, str]]:
    """A server that is gone afterwards; its URL and that of its worker's metrics."""
    port, health = _free_port(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ropeway", "serve", "--port", str(port), "--health-port", str(health),
            "--data-dir", f"{folder}/redis", "--adapter-store", f"{folder}/adapters",
            "--enable-lora", "--max-loras", str(SLOTS), "--deterministic", "--log-level", "warning",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1], env=os.environ)
        try:
            for address in (f"http://127.0.0.1:{port}/ready", f"http://127.0.0.1:{health}/ready"):
                while not _answers(address):
                    if process.poll() is not None:
                        sys.exit("the server has ended")
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{health}/metrics"
        finally:
            process.terminate()
            process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)))
    with server() as (own_url, own_metrics):
        code = asyncio.run(main(own_url, own_metrics))
    sys.exit(code)
