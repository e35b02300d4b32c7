"""Adapters in a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO

from shared.adapter_store.base import (
    RETRY_AFTER_S,
    UPLOADS,
    AdapterStore,
    checked,
    checked_upload,
    sweep_folder,
    trouble,
)
from shared.errors import AdapterError, StoreUnavailableError
from shared.lora.files import FILES, content_identity


class FolderStore(AdapterStore):
    """A folder that all processes of the deployment can read."""

    def folder(self, identity: str) -> Path:
        """See `AdapterStore.folder`."""
        path = self._place(identity)
        if not self.holds(identity):
            raise StoreUnavailableError(f"adapter {identity} is not in the store", retry_after=RETRY_AFTER_S)
        return path

    def holds(self, identity: str) -> bool:
        """See `AdapterStore.holds`."""
        path = self._place(identity)
        with trouble("the adapter store cannot be read"):
            return all((path / name).is_file() for name in FILES)

    def adopt(self, folder: Path, identity: str) -> None:
        """See `AdapterStore.adopt`."""
        place = self._place(identity)
        with trouble("the adapter store cannot be written"):
            for name in FILES:
                _settle(folder / name)
            if self._is_sound(place, identity):
                return
            self._move_away(place)  # somebody has damaged it
            try:
                folder.chmod(0o755)
                folder.rename(place)
            except OSError:
                if not self._is_sound(place, identity):  # somebody else's copy of the same content is as good
                    raise
            else:
                _settle(self._local)

    def delete(self, identity: str) -> None:
        """See `AdapterStore.delete`."""
        place = self._place(identity)
        with trouble("the adapter store cannot be written"):
            self._move_away(place)

    def discard_copy(self, identity: str) -> None:
        """See `AdapterStore.discard_copy`."""

    def create_upload(self, upload: str, file: str) -> IO[bytes]:
        """See `AdapterStore.create_upload`."""
        folder = self._local / UPLOADS / checked_upload(upload, file)
        with trouble("the adapter store cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / file).open("xb")

    def fetch_upload(self, upload: str, folder: Path) -> None:
        """See `AdapterStore.fetch_upload`."""
        place = self._local / UPLOADS / checked_upload(upload)
        with trouble("the adapter store cannot be read"):
            if not place.is_dir():
                raise AdapterError("the upload is gone; upload it again")
            for name in FILES:
                if (place / name).is_file():
                    shutil.copyfile(place / name, folder / name)

    def drop_upload(self, upload: str) -> None:
        """See `AdapterStore.drop_upload`."""
        place = self._local / UPLOADS / checked_upload(upload)
        with trouble("the adapter store cannot be written"):
            self._move_away(place)

    def sweep(self, older_than_s: float) -> None:
        """See `AdapterStore.sweep`."""
        with trouble("the adapter store cannot be written"):
            self._sweep_incoming(older_than_s)
            sweep_folder(self._local / UPLOADS, older_than_s)

    def _place(self, identity: str) -> Path:
        return self._local / checked(identity)

    def _is_sound(self, place: Path, identity: str) -> bool:
        try:
            return place.is_dir() and content_identity(place) == identity
        except AdapterError:
            return False


def _settle(path: Path) -> None:
    """Have a file, or a folder's entries, on the disk before anybody is told of them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
