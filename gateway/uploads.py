"""An adapter's two files in a multipart body, written to the store as they come. Nothing of them is kept in memory."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager
from typing import IO

from gateway.multipart import MultipartForm, boundary_of, receive
from shared.adapter_store import AdapterStore
from shared.adapter_store.base import trouble
from shared.errors import InvalidRequestError
from shared.lora.files import FILES, PICKLE_FILE
from shared.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES

__all__ = ["UploadForm", "boundary_of", "receive"]


class UploadForm(MultipartForm):
    """Takes a body in pieces.

    Args:
        boundary: of the body's Content-Type.
        max_bytes: largest file of weights.
    """

    def __init__(self, store: AdapterStore, boundary: bytes, max_bytes: int) -> None:
        super().__init__(boundary)
        self.upload = secrets.token_hex(16)
        self.files: set[str] = set()
        self._store, self._max_bytes = store, max_bytes

    def is_file(self, name: str, has_filename: bool) -> bool:
        """See `MultipartForm.is_file`."""
        return has_filename or name in FILES

    def begin_file(self, name: str, filename: str) -> tuple[str, IO[bytes]]:
        """See `MultipartForm.begin_file`."""
        file = filename if filename in FILES else name
        if PICKLE_FILE in (filename, name):
            raise InvalidRequestError(
                f"{PICKLE_FILE}: only safetensors are read; save the adapter as {FILES[1]}", param=PICKLE_FILE
            )
        if file not in FILES or file in self.files:
            raise InvalidRequestError(
                f"the form must have the files {FILES[0]} and {FILES[1]}, each once, and no others"
            )
        self.files.add(file)
        return file, self._store.create_upload(self.upload, file)

    def writing(self) -> AbstractContextManager[None]:
        """See `MultipartForm.writing`."""
        return trouble("the adapter store cannot be written")

    def max_bytes(self, file: str) -> int:
        """See `MultipartForm.max_bytes`."""
        return MAX_CONFIG_BYTES if file == CONFIG_FILE else self._max_bytes

    def check_files(self) -> None:
        """See `MultipartForm.check_files`."""
        for name in FILES:
            if name not in self.files:
                raise InvalidRequestError(f"{name}: the form has no such file", param=name)

    def drop_files(self) -> None:
        """See `MultipartForm.drop_files`."""
        if self.files:
            self._store.drop_upload(self.upload)
