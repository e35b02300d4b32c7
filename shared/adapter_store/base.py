"""What every store of adapters does, and how its failures are told."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import structlog

from shared.errors import AdapterError, StoreUnavailableError
from shared.lora.files import FILES, IDENTITY_PATTERN
from shared.lora.peft_config import CONFIG_FILE

_log = structlog.stdlib.get_logger("shared.adapter_store")

#: Seconds after which it makes sense to ask a store again that was away.
RETRY_AFTER_S: Final = 2.0
#: Folders of a store that hold no adapter.
INCOMING, UPLOADS = ".incoming", "uploads"
_UPLOAD_PATTERN = re.compile(r"[0-9a-f]{32}")


class AdapterStore(ABC):
    """Adapters by content identity, and uploads that wait to be checked.

    Args:
        local: a folder on this machine, for what is under way and, of a remote store, for copies.
    """

    def __init__(self, local: Path) -> None:
        self._local = local.absolute()

    @abstractmethod
    def folder(self, identity: str) -> Path:
        """A local folder with an adapter's two files; of a remote store a copy, made once for all processes here.

        Raises:
            AdapterError: the store's files are not what their name says; no copy is left.
            StoreUnavailableError: the store is away, or has no such adapter.
            ValueError: `identity` is none.
        """

    @abstractmethod
    def holds(self, identity: str) -> bool:
        """Whether an adapter is completely there. Raises StoreUnavailableError."""

    @abstractmethod
    def adopt(self, folder: Path, identity: str) -> None:
        """Keep the files of a folder made by `incoming`, whose content has this identity. Repeating it is harmless.

        Raises:
            StoreUnavailableError: the store is away, full or read-only.
        """

    @abstractmethod
    def delete(self, identity: str) -> None:
        """Forget an adapter; one that is not there is no error. Raises StoreUnavailableError."""

    @abstractmethod
    def discard_copy(self, identity: str) -> None:
        """Have the next `folder` copy it anew; nothing where `folder` makes no copies. A copy that cannot go stays."""

    @abstractmethod
    def create_upload(self, upload: str, file: str) -> IO[bytes]:
        """A file of an upload (32 hex digits), to be written and closed. Raises StoreUnavailableError."""

    @abstractmethod
    def fetch_upload(self, upload: str, folder: Path) -> None:
        """Copy an upload's files to a folder.

        Raises:
            AdapterError: there is no such upload, or not any more.
            StoreUnavailableError: the store is away.
        """

    @abstractmethod
    def drop_upload(self, upload: str) -> None:
        """Delete an upload; one that is not there is no error. Raises StoreUnavailableError."""

    @abstractmethod
    def sweep(self, older_than_s: float) -> None:
        """Delete uploads and half-made copies that somebody left behind. Raises StoreUnavailableError."""

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """An empty private folder, gone at the end unless it was adopted. Raises StoreUnavailableError."""
        with trouble("the adapter store cannot be written"):
            (self._local / INCOMING).mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=self._local / INCOMING))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _sweep_incoming(self, older_than_s: float) -> None:
        sweep_folder(self._local / INCOMING, older_than_s)

    def _move_away(self, path: Path) -> None:
        """Delete a folder so that nobody ever sees half of it."""
        if not path.exists():
            return
        (self._local / INCOMING).mkdir(parents=True, exist_ok=True)
        trash = Path(tempfile.mkdtemp(dir=self._local / INCOMING))
        with suppress(FileNotFoundError):  # somebody else was quicker
            path.rename(trash / "gone")
        shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def trouble(what: str) -> Iterator[None]:
    """Failures of a file system as an error that passes. Object stores raise whatever their libraries have."""
    try:
        yield
    except (AdapterError, StoreUnavailableError):
        raise
    except Exception as error:
        _log.warning("adapter store failed", what=what, error=type(error).__name__, exc_info=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise StoreUnavailableError(f"{what}: {reason}", retry_after=RETRY_AFTER_S) from error


def checked(identity: str) -> str:
    if IDENTITY_PATTERN.fullmatch(identity) is None:
        raise ValueError("an adapter's identity has 32 hexadecimal digits")
    return identity


def checked_upload(upload: str, file: str = CONFIG_FILE) -> str:
    if _UPLOAD_PATTERN.fullmatch(upload) is None or file not in FILES:
        raise ValueError("an upload has 32 hexadecimal digits and an adapter's two files")
    return upload


def sweep_folder(folder: Path, older_than_s: float) -> None:
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        try:
            age = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if age > older_than_s:
            shutil.rmtree(path, ignore_errors=True)
