"""GGUF files once converted: config, tokenizer and weights in the model's dtype, kept in the cache folder.

Reading a GGUF file means to parse a hundred thousand strings and to dequantise every weight. What comes out is the
same each time, so it is kept, by the file's content and the dtype; the weights as the kernels lay them out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from engine.loading.checkpoint import Checkpoint, TokenizerBundle
from engine.loading.gguf import GGUFFile
from engine.loading.weight_file import read_weights, write_weights

logger = logging.getLogger(__name__)

#: The layout of tensors as they are in a checkpoint.
ROWS = "rows"

#: Raised when what is kept changes its form or its content, other than by the layout of packed weights.
_VERSION = 2
_TOKENIZER, _REST = "tokenizer.json", "checkpoint.json"


@dataclass(frozen=True, slots=True)
class Converted:
    """What is kept, or will be, of a GGUF file.

    Attributes:
        folder: where.
        source: the file.
        dtype: of the weights.
    """

    folder: Path
    source: Path
    dtype: torch.dtype

    @classmethod
    def of(cls, cache_dir: Path, source: Path, digest: str, dtype: torch.dtype) -> Converted:
        """Of a file of this content."""
        name = hashlib.sha256(json.dumps([_VERSION, digest, str(dtype)]).encode()).hexdigest()
        return cls(cache_dir / "converted" / name[:32], source, dtype)

    def read(self, name: str) -> Checkpoint | None:
        """All but the weights, under the name given; None where there is nothing, or it cannot be read."""
        if not self.folder.is_dir():
            return None
        try:
            rest: dict[str, Any] = json.loads((self.folder / _REST).read_text("utf-8"))
            return Checkpoint(
                name=name,
                config=rest["config"],
                tensors={},
                bundle=TokenizerBundle(
                    tokenizer=Tokenizer.from_file(str(self.folder / _TOKENIZER)),
                    chat_template=rest["chat_template"],
                    special_tokens=rest["special_tokens"],
                    eos_token_ids=rest["eos_token_ids"],
                ),
                digest=rest["digest"],
                converted=self,
            )
        # `tokenizers` raises a bare Exception for what it cannot parse.
        except (OSError, ValueError, KeyError, Exception) as error:  # noqa: BLE001
            logger.warning("%s is made anew: %s", self.folder, error)
            return None

    def keep(self, checkpoint: Checkpoint) -> None:
        """All but the weights. A folder that cannot be written only costs the next start its time."""
        partial: Path | None = None
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial = Path(tempfile.mkdtemp(dir=self.folder.parent))
            rest = {
                "config": checkpoint.config,
                "chat_template": checkpoint.bundle.chat_template,
                "special_tokens": checkpoint.bundle.special_tokens,
                "eos_token_ids": checkpoint.bundle.eos_token_ids,
                "digest": checkpoint.digest,
            }
            (partial / _REST).write_text(json.dumps(rest), "utf-8")
            checkpoint.bundle.tokenizer.save(str(partial / _TOKENIZER))
            shutil.rmtree(self.folder, ignore_errors=True)
            partial.rename(self.folder)
        except OSError as error:
            self._not_kept(error)
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)

    def read_weights(self, layout: str, *, mapped: bool) -> dict[str, torch.Tensor] | None:
        """The weights in this layout, in the names of whoever laid them out; None where they are not kept."""
        try:
            return read_weights(self.folder, layout, mapped=mapped)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s is made anew: %s", self.folder / layout, error)
            return None

    def convert(self) -> dict[str, torch.Tensor]:
        """The weights as rows, from the file itself."""
        return GGUFFile(self.source).tensors(self.dtype)

    def keep_weights(self, layout: str, tensors: dict[str, torch.Tensor]) -> None:
        """The weights in this layout. A folder that cannot be written only costs the next start its time."""
        try:
            write_weights(self.folder, layout, tensors)
        except OSError as error:
            self._not_kept(error)

    def begin_to_keep(self, layout: str, tensors: dict[str, torch.Tensor]) -> None:
        """As `keep_weights`, in a thread that the process waits for before it ends."""
        threading.Thread(target=self.keep_weights, args=(layout, tensors), name="keep-weights", daemon=False).start()

    def _not_kept(self, error: OSError) -> None:
        logger.warning("the converted model cannot be kept in %s: %s", self.folder, error)
