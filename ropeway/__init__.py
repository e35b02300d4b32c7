"""Ropeway: message-queue-driven inference for language models.

`LLM`, `LoRARequest` and `SamplingParams` are imported on first use: `import ropeway` and `ropeway.client` need neither
torch nor any other room.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.adapters.request import LoRARequest
    from engine.llm import LLM
    from shared.sampling import SamplingParams

__all__ = ["LLM", "LoRARequest", "SamplingParams", "__version__"]

#: Where each public name lives, and the extra that brings what it needs.
_LAZY = {
    "LLM": ("engine.llm", "worker"),
    "LoRARequest": ("engine.adapters.request", "worker"),
    "SamplingParams": ("shared.sampling", "worker"),
}

try:
    __version__ = version("ropeway")
except PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _LAZY[name]
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"ropeway.{name} needs {error.name}: pip install 'ropeway[{extra}]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
