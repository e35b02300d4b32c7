"""Contents of files, and the pieces that batches' output is made of: in a folder or an object store, through fsspec.

`<store>/files/<id>` and `<store>/parts/<batch>/<name>`. Names are made here; what a client says never enters a path.
All calls block: make them in a thread.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import fsspec
import structlog

from shared.adapter_store import user_cache_dir
from shared.errors import InvalidRequestError, StoreUnavailableError

log = structlog.stdlib.get_logger("shared.file_store")

#: Seconds after which it makes sense to ask a store again that was away.
RETRY_AFTER_S: Final = 2.0
_BUFFER: Final = 1024 * 1024
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_FILE: Final = re.compile(r"file-[0-9a-f]{32}")
_BATCH: Final = re.compile(r"batch_[0-9a-f]{32}")
_PART: Final = re.compile(r"[0-9]{1,12}-[0-9a-f]{32}\.(?:out|err)")


class FileStore:
    """Contents by id.

    Args:
        setting: a folder, an fsspec URL, or None for a folder in the user's cache folder.

    Raises:
        InvalidRequestError: no file system is installed for the URL.
    """

    def __init__(self, setting: str | None) -> None:
        place = (setting or "").strip() or str(user_cache_dir() / "files")
        url = place if _URL.match(place) else f"file://{Path(place).expanduser().absolute()}"
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise InvalidRequestError(f"files_store: {error}", param="files_store") from None
        self._root = str(root).rstrip("/")

    def create(self, file_id: str) -> IO[bytes]:
        """A file's content, to be written and closed; one that is there is replaced. Raises StoreUnavailableError."""
        return self._opened(self._file(file_id), "wb")

    def open(self, file_id: str) -> IO[bytes]:
        """A file's content, to be read.

        Raises:
            FileNotFoundError: it is not there.
            StoreUnavailableError: the store is away.
        """
        # Those of object stores have no bounded readline of their own.
        return io.BufferedReader(self._opened(self._file(file_id), "rb"), _BUFFER)  # type: ignore[type-var]

    def delete(self, file_id: str) -> None:
        """Delete a content; one that is not there is no error. Raises StoreUnavailableError."""
        path = self._file(file_id)
        with trouble(), suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def write_part(self, batch: str, name: str, data: bytes) -> None:
        """Write a piece of a batch's output whole. Raises StoreUnavailableError."""
        path = self._part(batch, name)
        with trouble(), self._opened(path, "wb") as stream:
            stream.write(data)

    def read_part(self, batch: str, name: str) -> bytes:
        """A piece of a batch's output; empty where there is none. Raises StoreUnavailableError."""
        path = self._part(batch, name)
        with trouble():
            try:
                with self._fs.open(path, "rb") as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return b""

    def drop_parts(self, batch: str) -> None:
        """Delete a batch's pieces. Raises StoreUnavailableError."""
        path = f"{self._root}/parts/{_checked(_BATCH, batch)}"
        with trouble(), suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    def _opened(self, path: str, mode: str) -> IO[bytes]:
        with trouble():
            if mode == "wb":
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            stream: IO[bytes] = self._fs.open(path, mode)
            return stream

    def _file(self, file_id: str) -> str:
        return f"{self._root}/files/{_checked(_FILE, file_id)}"

    def _part(self, batch: str, name: str) -> str:
        return f"{self._root}/parts/{_checked(_BATCH, batch)}/{_checked(_PART, name)}"


@contextmanager
def trouble() -> Iterator[None]:
    """Failures of a file system as an error that passes. Object stores raise whatever their libraries have."""
    try:
        yield
    except (FileNotFoundError, StoreUnavailableError):
        raise
    except Exception as error:
        log.warning("file store failed", error=type(error).__name__, exc_info=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise StoreUnavailableError(
            f"the store of files is not available: {reason}", retry_after=RETRY_AFTER_S
        ) from error


def _checked(pattern: re.Pattern[str], name: str) -> str:
    if pattern.fullmatch(name) is None:
        raise ValueError("this is no name in the store of files")
    return name
