"""Random adapters in PEFT's format, for benchmarks: written without PEFT, which is slow to make hundreds of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, config: ModelConfig, seed: int, *, rank: int = 16, modules: Sequence[str] = LINEAR, **options: Any
) -> Path:
    """Write one whose effect on the text is plain, and answer its folder.

    Args:
        modules: ends of the names of what it changes.
        options: fields of `adapter_config.json`.
    """
    import torch
    from safetensors.torch import save_file

    from engine.adapters.targets import targets

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, target in targets(config).items():
        if name.endswith(tuple(modules)):
            a = torch.randn(rank, target.inputs, generator=generator) / target.inputs**0.5
            b = torch.randn(target.outputs, rank, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), **options}
    (folder / "adapter_config.json").write_text(json.dumps(fields), "utf-8")
    return folder
