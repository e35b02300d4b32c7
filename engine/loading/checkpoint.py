"""A checkpoint as both readers give it: config, tensors and tokenizer in Hugging Face form."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from engine.loading.converted import Converted

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TokenizerBundle:
    """A tokenizer with what belongs to it.

    Attributes:
        tokenizer: ready to use.
        chat_template: Jinja source, or None.
        special_tokens: text by role, such as `bos_token`.
        eos_token_ids: ids that end an answer, at least one where the checkpoint names any.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: list[int]


@dataclass(slots=True)
class Checkpoint:
    """All of a model that is read from disk.

    Attributes:
        name: what to call it when nobody says otherwise.
        config: as in `config.json`.
        tensors: by Hugging Face name.
        bundle: tokenizer and template.
        sampling_defaults: of the generation config, by `SamplingParams` name.
        digest: identity of config, weights and tokenizer.
        converted: where the weights are, or will be, kept in the layout of the kernels; `tensors` may then be empty.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    bundle: TokenizerBundle
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    converted: Converted | None = None


def content_digest(files: Iterable[Path], cache_dir: Path) -> str:
    """SHA-256 over the files' contents, remembered by path, size and time of change so that it is read once."""
    total = hashlib.sha256()
    for path in sorted(files):
        status = path.stat()
        identity = json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns])
        note = cache_dir / "digests" / hashlib.sha256(identity.encode()).hexdigest()
        digest = _read_note(note)
        if digest is None:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            write_atomically(note, digest)
        total.update(path.name.encode() + b"\0" + digest.encode())
    return total.hexdigest()


def _read_note(path: Path) -> str | None:
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) == hashlib.sha256().digest_size * 2 else None


def write_atomically(path: Path, text: str) -> None:
    """Write a cache file by rename. A folder that cannot be written only costs the next start its time."""
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as stream:
            partial = Path(stream.name)
            stream.write(text)
        partial.replace(path)
    except OSError as error:
        logger.warning("cache file %s cannot be written: %s", path, error)
        if partial is not None:
            partial.unlink(missing_ok=True)
