"""GGUF files once converted: config, tokenizer and tensors in the model's dtype, kept in the cache folder and mapped.

Reading a GGUF file means to parse a hundred thousand strings and to dequantise every weight. What comes out is the
same each time, so it is kept, by the file's content and the dtype.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.loading.checkpoint import Checkpoint, TokenizerBundle
from engine.loading.safetensors import load_tensors

logger = logging.getLogger(__name__)

#: Raised when what is kept changes its form or its content.
_VERSION = 1
_TENSORS, _TOKENIZER, _REST = "model.safetensors", "tokenizer.json", "checkpoint.json"


def converted_folder(cache_dir: Path, digest: str, dtype: torch.dtype) -> Path:
    """Where the conversion of a file of this content is kept, if it is."""
    name = hashlib.sha256(json.dumps([_VERSION, digest, str(dtype)]).encode()).hexdigest()
    return cache_dir / "converted" / name[:32]


def read_converted(folder: Path, name: str) -> Checkpoint | None:
    """What `keep_converted` has kept, under the name given; None where there is nothing, or it cannot be read."""
    if not folder.is_dir():
        return None
    try:
        rest: dict[str, Any] = json.loads((folder / _REST).read_text("utf-8"))
        return Checkpoint(
            name=name,
            config=rest["config"],
            tensors=load_tensors([folder / _TENSORS]),
            bundle=TokenizerBundle(
                tokenizer=Tokenizer.from_file(str(folder / _TOKENIZER)),
                chat_template=rest["chat_template"],
                special_tokens=rest["special_tokens"],
                eos_token_ids=rest["eos_token_ids"],
            ),
            digest=rest["digest"],
        )
    # `tokenizers` raises a bare Exception for what it cannot parse.
    except (OSError, ValueError, KeyError, SafetensorError, Exception) as error:  # noqa: BLE001
        logger.warning("%s is made anew: %s", folder, error)
        return None


def keep_converted(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Convert a checkpoint's tensors in place, and keep it; a folder that cannot be written only costs the next start
    its time."""
    for name, tensor in checkpoint.tensors.items():
        checkpoint.tensors[name] = tensor.to(dtype).contiguous()
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        rest = {
            "config": checkpoint.config,
            "chat_template": checkpoint.bundle.chat_template,
            "special_tokens": checkpoint.bundle.special_tokens,
            "eos_token_ids": checkpoint.bundle.eos_token_ids,
            "digest": checkpoint.digest,
        }
        (partial / _REST).write_text(json.dumps(rest), "utf-8")
        checkpoint.bundle.tokenizer.save(str(partial / _TOKENIZER))
        save_file(checkpoint.tensors, partial / _TENSORS)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        logger.warning("the converted model cannot be kept in %s: %s", folder, error)
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
