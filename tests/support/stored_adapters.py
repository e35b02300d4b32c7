"""Adapters as files, made by numpy alone: for workers that are processes, and for the simulated engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.sim_adapters import SIM_MODULES
from shared.adapter_store import FolderStore
from shared.lora.files import content_identity
from shared.lora.peft_config import CONFIG_FILE


def write_adapter(
    folder: Path, seed: int, modules: Mapping[str, tuple[int, int]] = SIM_MODULES, rank: int = 4, scale: float = 0.2
) -> Path:
    """A random adapter of these modules (inputs, outputs), in PEFT's form; the folder that it was given."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for module, (inputs, outputs) in modules.items():
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = (random.standard_normal(shape) * scale).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({module.rsplit(".", 1)[-1] for module in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def put_adapter(
    store: Path, seed: int, modules: Mapping[str, tuple[int, int]] = SIM_MODULES, rank: int = 4, scale: float = 0.2
) -> str:
    """The same in a store's folder; its identity."""
    with FolderStore(store).incoming() as folder:
        identity = content_identity(write_adapter(folder, seed, modules, rank, scale))
        FolderStore(store).adopt(folder, identity)
    return identity
