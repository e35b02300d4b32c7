"""Adapters in an object store, through fsspec."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import fsspec
import structlog
from filelock import FileLock

from shared.adapter_store.base import (
    RETRY_AFTER_S,
    UPLOADS,
    AdapterStore,
    checked,
    checked_upload,
    trouble,
)
from shared.errors import AdapterError, InvalidRequestError, StoreUnavailableError
from shared.lora.files import FILES, IDENTITY_PATTERN, content_identity
from shared.lora.peft_config import CONFIG_FILE

_log = structlog.stdlib.get_logger("shared.adapter_store")

LOCKS = ".locks"


class RemoteStore(AdapterStore):
    """An object store behind fsspec. Weights are written first: where there is a config, the adapter is complete.

    Args:
        url: of the folder, as fsspec reads it.
        copies: where this machine keeps what it has read, by identity.
        most_bytes: of all copies, beside the newest; those that were read longest ago go first.
    """

    def __init__(self, url: str, copies: Path, most_bytes: float = math.inf) -> None:
        super().__init__(copies)
        self._most_bytes = most_bytes
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise InvalidRequestError(f"adapter_store: {error}", param="adapter_store") from None
        self._root = str(root).rstrip("/")

    def folder(self, identity: str) -> Path:
        """See `AdapterStore.folder`."""
        copy = self._local / checked(identity)
        if self._used(copy):
            return copy
        with trouble("adapters cannot be kept on this machine"):
            (self._local / LOCKS).mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._local / LOCKS / identity)
            with lock:
                if not self._used(copy):
                    self._copy(identity, copy)
                    self._trim(copy)
        return copy

    def holds(self, identity: str) -> bool:
        """See `AdapterStore.holds`."""
        path = self._path(identity, CONFIG_FILE)
        with trouble("the adapter store cannot be read"):
            return bool(self._fs.exists(path))

    def adopt(self, folder: Path, identity: str) -> None:
        """See `AdapterStore.adopt`."""
        with trouble("the adapter store cannot be written"):
            if all(self._size(identity, name) == (folder / name).stat().st_size for name in FILES):
                return
            self._fs.makedirs(f"{self._root}/{checked(identity)}", exist_ok=True)
            for name in reversed(FILES):
                self._fs.put_file(str(folder / name), self._path(identity, name))

    def delete(self, identity: str) -> None:
        """See `AdapterStore.delete`."""
        paths = [self._path(identity, name) for name in FILES]
        with trouble("the adapter store cannot be written"):
            for path in paths:
                self._remove(path)
        self.discard_copy(identity)

    def discard_copy(self, identity: str) -> None:
        """See `AdapterStore.discard_copy`."""
        copy = self._local / checked(identity)
        try:
            self._move_away(copy)
        except OSError as error:
            _log.warning("copy of an adapter not deleted", identity=identity, error=error.strerror)

    def create_upload(self, upload: str, file: str) -> IO[bytes]:
        """See `AdapterStore.create_upload`."""
        folder = f"{self._root}/{UPLOADS}/{checked_upload(upload, file)}"
        with trouble("the adapter store cannot be written"):
            self._fs.makedirs(folder, exist_ok=True)
            opened: IO[bytes] = self._fs.open(f"{folder}/{file}", "wb")
            return opened

    def fetch_upload(self, upload: str, folder: Path) -> None:
        """See `AdapterStore.fetch_upload`."""
        place = f"{self._root}/{UPLOADS}/{checked_upload(upload)}"
        with trouble("the adapter store cannot be read"):
            there = [name for name in FILES if self._fs.exists(f"{place}/{name}")]
            if not there:
                raise AdapterError("the upload is gone; upload it again")
            for name in there:
                self._fs.get_file(f"{place}/{name}", str(folder / name))

    def drop_upload(self, upload: str) -> None:
        """See `AdapterStore.drop_upload`."""
        place = f"{self._root}/{UPLOADS}/{checked_upload(upload)}"
        with trouble("the adapter store cannot be written"):
            for name in FILES:
                self._remove(f"{place}/{name}")

    def sweep(self, older_than_s: float) -> None:
        """See `AdapterStore.sweep`. How old an upload is, is up to the store's own clock."""
        with trouble("the adapter store cannot be written"):
            self._sweep_incoming(older_than_s)
            place = f"{self._root}/{UPLOADS}"
            for path in self._fs.find(place) if self._fs.exists(place) else ():
                if time.time() - self._fs.modified(path).timestamp() > older_than_s:
                    self._remove(path)

    def _copy(self, identity: str, copy: Path) -> None:
        with self.incoming() as partial:
            with trouble("the adapter store cannot be read"):
                if not self._fs.exists(self._path(identity, CONFIG_FILE)):
                    raise StoreUnavailableError(f"adapter {identity} is not in the store", retry_after=RETRY_AFTER_S)
                for name in FILES:
                    self._fs.get_file(self._path(identity, name), str(partial / name))
            if content_identity(partial) != identity:
                raise AdapterError(f"adapter {identity}: the store's files are others than their name says")
            self._move_away(copy)
            partial.rename(copy)
            self._used(copy)

    def _used(self, copy: Path) -> bool:
        """Whether a copy is there; it is then the one that was used last."""
        with suppress(OSError):  # not there, or not ours: then the order of deletion is not the best
            os.utime(copy)
        return (copy / CONFIG_FILE).is_file()

    def _trim(self, newest: Path) -> None:
        """Delete copies beyond the limit. Whoever has just been given one finds it gone, and asks for it again."""
        found = []
        for path in self._local.iterdir():
            with suppress(FileNotFoundError):  # somebody else was quicker
                if path != newest and IDENTITY_PATTERN.fullmatch(path.name):
                    size = sum((path / name).stat().st_size for name in FILES)
                    found.append((path.stat().st_mtime_ns, size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._most_bytes:
                return
            self.discard_copy(path.name)
            total -= size
            _log.info("copy of an adapter deleted, there are too many", identity=path.name, bytes=size)

    def _path(self, identity: str, name: str) -> str:
        return f"{self._root}/{checked(identity)}/{name}"

    def _size(self, identity: str, name: str) -> int | None:
        try:
            return int(self._fs.info(self._path(identity, name))["size"])
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)
