"""Folders in Hugging Face form: `config.json` with safetensors, sharded or not."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from engine.loading.tokenizer import read_json

_INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model.

    Raises:
        ValueError: there are none, a shard is missing, or a name leads out of the folder.
    """
    index = read_json(folder / _INDEX)
    if index:
        names = sorted(set(index.get("weight_map", {}).values()))
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{folder / _INDEX}: a shard is not in the folder itself")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors file")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{folder}: shard {file.name} is missing")
    return files


def load_tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """All tensors by name, mapped from the files.

    Raises:
        ValueError: two files hold the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a file handle, not a mapping
                if name in tensors:
                    raise ValueError(f"{file.name}: tensor {name} is in another file too")
                tensors[name] = shard.get_tensor(name)
    return tensors
