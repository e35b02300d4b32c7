"""The gateway is light: what it must never import."""

from __future__ import annotations

import subprocess
import sys


def test_neither_torch_nor_transformers_nor_an_engine_is_imported() -> None:
    code = (
        "import sys, gateway.main; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'engine', 'kernels', 'worker') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
