"""An adapter's folder: its two files, and the hash of what they compute."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from shared.errors import AdapterError
from shared.lora.peft_config import CONFIG_FILE, read_config

WEIGHTS_FILE = "adapter_model.safetensors"
#: All that is read, kept and sent of an adapter.
FILES = (CONFIG_FILE, WEIGHTS_FILE)
PICKLE_FILE = "adapter_model.bin"
#: Names of adapters: letters, digits and `._-`, at most one slash; never what could be a path.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
IDENTITY_PATTERN = re.compile(r"[0-9a-f]{32}")


def weights_file(folder: Path) -> Path:
    """The file with a folder's weights.

    Raises:
        AdapterError: there is none in safetensors form.
    """
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return path
    if (folder / PICKLE_FILE).exists():
        raise AdapterError(f"{PICKLE_FILE}: only safetensors are read; save the adapter as {WEIGHTS_FILE}")
    raise AdapterError(f"{WEIGHTS_FILE}: there is no such file in the adapter's folder")


def content_identity(folder: Path) -> str:
    """Hash of what an adapter computes: weights, and those fields of its config that count.

    Raises:
        AdapterError: as `read_config`; there are no weights in safetensors form.
    """
    config = msgspec.json.encode(read_config(folder), order="deterministic")
    total = hashlib.blake2b(hashlib.sha256(config).digest(), digest_size=16)
    try:
        with weights_file(folder).open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise AdapterError(f"{WEIGHTS_FILE}: cannot be read: {error.strerror}") from None
    return total.hexdigest()
