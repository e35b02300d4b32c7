"""Where adapters are kept for all processes of a deployment: by their content, in a folder or in an object store.

`<store>/<identity>/` holds `adapter_config.json` and `adapter_model.safetensors`. A name never enters a path. All calls
block: make them in a thread.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from shared.adapter_store.base import AdapterStore
from shared.adapter_store.local import FolderStore
from shared.adapter_store.uploads import discard_upload
from shared.errors import StoreUnavailableError

__all__ = [
    "AdapterStore", "FolderStore", "StoreUnavailableError", "default_store", "discard_upload", "open_store",
    "user_cache_dir",
]  # fmt: skip

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def default_store() -> Path:
    """`$XDG_CACHE_HOME/ropeway/adapters`, else `~/.cache/ropeway/adapters`."""
    return user_cache_dir() / "adapters"


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/ropeway`, else `~/.cache/ropeway`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "ropeway"


def open_store(
    setting: str | None, cache_dir: Path | None = None, *, most_copies_bytes: float = math.inf
) -> AdapterStore:
    """The store that a setting names: a folder, an fsspec URL such as `s3://bucket/adapters`, or None for
    `default_store`.

    Args:
        cache_dir: where copies of what is in an object store are kept; None: the user's cache folder.
        most_copies_bytes: of these, beside the newest.

    Raises:
        InvalidRequestError: no file system is installed for the URL.
    """
    if setting is None or not setting.strip():
        return FolderStore(default_store())
    if setting.startswith("file://"):
        return FolderStore(Path(setting.removeprefix("file://")))
    if _URL.match(setting):
        from shared.adapter_store.remote import RemoteStore  # its libraries take time, and most need them not

        return RemoteStore(setting, (cache_dir or user_cache_dir()) / "adapter-copies", most_copies_bytes)
    return FolderStore(Path(setting).expanduser())
