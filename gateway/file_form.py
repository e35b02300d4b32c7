"""A file of `POST /v1/files`, written to the store as it comes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import IO

from gateway.multipart import MultipartForm
from shared.errors import InvalidRequestError
from shared.file_store import FileStore, trouble

#: Characters of a file's name that are kept.
_MAX_NAME = 256


class FileForm(MultipartForm):
    """Takes a body in pieces; its only file becomes `file_id`.

    Args:
        boundary: of the body's Content-Type.
        max_bytes: largest file.
    """

    def __init__(self, store: FileStore, file_id: str, boundary: bytes, max_bytes: int) -> None:
        super().__init__(boundary)
        self.filename: str | None = None
        self._store, self._id, self._most = store, file_id, max_bytes

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.sizes.get("file", 0)

    def is_file(self, name: str, has_filename: bool) -> bool:
        """See `MultipartForm.is_file`."""
        return has_filename or name == "file"

    def begin_file(self, name: str, filename: str) -> tuple[str, IO[bytes]]:
        """See `MultipartForm.begin_file`."""
        if name != "file" or self.filename is not None:
            raise InvalidRequestError("file: the form must have one file, under this name", param="file")
        stream = self._store.create(self._id)
        self.filename = filename[:_MAX_NAME] or "file"
        return name, stream

    def writing(self) -> AbstractContextManager[None]:
        """See `MultipartForm.writing`."""
        return trouble()

    def max_bytes(self, file: str) -> int:
        """See `MultipartForm.max_bytes`."""
        return self._most

    def check_files(self) -> None:
        """See `MultipartForm.check_files`."""
        if self.filename is None:
            raise InvalidRequestError("file: this field is required", param="file")

    def drop_files(self) -> None:
        """See `MultipartForm.drop_files`."""
        if self.filename is not None:
            self._store.delete(self._id)
