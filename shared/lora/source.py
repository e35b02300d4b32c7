"""Where an adapter is loaded from, as a client writes it in `lora_path`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NoReturn

from shared.errors import InvalidRequestError

_UPLOAD = "upload:"
_HUB = "hf:"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REPO = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?")
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_MAX_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Source:
    """A source taken apart.

    Attributes:
        where: a folder's path, a repository of the hub as `owner/name`, or an upload's id.
        revision: branch, tag or commit of the repository; None for its main branch.
    """

    kind: Literal["folder", "hub", "upload"]
    where: str
    revision: str | None = None


def upload_source(upload: str) -> str:
    """The source of an upload, as a record has it."""
    return f"{_UPLOAD}{upload}"


def parse_source(text: str, *, uploads: bool = False) -> Source:
    """Take a source apart.

    Args:
        uploads: whether it may be one; nobody may name another's.

    Raises:
        InvalidRequestError: a URL, a relative path, or nothing that is known.
    """
    if not text or len(text) > _MAX_CHARACTERS or not text.isprintable():
        _refuse("must be an absolute path of a folder, or a repository of the hub as owner/name")
    if uploads and text.startswith(_UPLOAD) and _UPLOAD_ID.fullmatch(text.removeprefix(_UPLOAD)):
        return Source("upload", text.removeprefix(_UPLOAD))
    if text.startswith("/"):
        return Source("folder", text)
    if "://" in text or text.lower().startswith(("http:", "https:", "file:", "ftp:", "s3:", "data:")):
        _refuse("URLs are not read; upload the files, or name a folder or a repository of the hub")
    match = _REPO.fullmatch(text.removeprefix(_HUB))
    if match is None or ".." in text or "--" in match["repo"]:
        _refuse("must be an absolute path of a folder, or a repository of the hub as owner/name")
    return Source("hub", match["repo"], match["revision"])


def _refuse(why: str) -> NoReturn:
    raise InvalidRequestError(f"lora_path: {why}", param="lora_path")
