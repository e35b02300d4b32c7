"""Adapters that PEFT itself makes and saves, random in both matrices so that their effect is visible."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def save_adapter(base: PreTrainedModel, folder: Path, seed: int = 0, **options: Any) -> PeftModel:
    """Write an adapter for a model, which stays as it is, and return the adapted model."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM"}
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PEFT's, about transformers' names and about embeddings that it saves
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**(settings | options))).eval()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model.save_pretrained(str(folder))
    return model


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a saved config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a saved adapter by the end of their names, dots written as `__`; None takes them out."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for end, value in changes.items():
        names = [name for name in tensors if name.endswith(end.replace("__", "."))]
        for name in names or [end.replace("__", ".")]:
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value
    save_file(tensors, path)
