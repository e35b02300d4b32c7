"""From settings to an engine, with what takes long begun first: the compiler works while Python imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.cache_folder import default_cache_dir
from engine.config import EngineConfig
from kernels import native_build

if TYPE_CHECKING:
    from engine.adapters.library import AdapterSource
    from engine.engine import Engine

#: There where the driver of an NVIDIA GPU is loaded: `auto` then most likely means that GPU.
_NVIDIA = Path("/proc/driver/nvidia/version")


def start_engine(config: EngineConfig, source: AdapterSource | None = None) -> Engine:
    """As `engine.build.build_engine`; imports torch, if nobody has yet.

    Raises:
        ValueError: the model is not found or not served, or a setting does not fit it.
    """
    if wants_native(config):
        native_build.begin(config.cache_dir or default_cache_dir())
    from engine.build import build_engine

    return build_engine(config, source)


def wants_native(config: EngineConfig) -> bool:
    """Whether the native CPU kernels will be asked for, as far as that is known without torch."""
    if config.kernels != "auto" or config.cpu_kernels == "torch" or config.device == "cuda":
        return False
    return config.device == "cpu" or not _NVIDIA.exists()
