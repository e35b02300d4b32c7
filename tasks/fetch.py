"""Fetching an adapter's two files to a private folder: from an allowed folder, the hub, or an upload.

Nothing else of a source is read, and of these no more than is allowed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import structlog

from shared.adapter_store import AdapterStore
from shared.errors import AdapterError, RopewayError, ServiceUnavailableError
from shared.lora.files import FILES, WEIGHTS_FILE, weights_file
from shared.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES
from shared.lora.source import Source

_log = structlog.stdlib.get_logger("tasks.fetch")

_PIECE: Final = 4 * 1024 * 1024
#: Seconds that the hub may take to say what it has.
_HUB_TIMEOUT_S: Final = 30.0
#: Refusals of the hub that may pass, of those that are the asker's fault: too slow, too early, too often.
_PASSING: Final = frozenset({408, 425, 429})
#: What a disk says that is full or must not be written to.
_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO})


class SourceUnavailableError(ServiceUnavailableError):
    """A source that is away for now."""

    code = "adapter_source_unavailable"


def fetch_folder(where: str, roots: Sequence[Path], target: Path, max_bytes: int) -> None:
    """Copy the files of a folder that is beneath one of `roots`, links resolved.

    Raises:
        AdapterError: it is not, or has no such files, or they are too large.
        SourceUnavailableError: it cannot be read now.
    """
    if not roots:
        raise AdapterError(
            "lora_path: no folder may be read here; the setting adapter_roots (ROPEWAY_ADAPTER_ROOTS) "
            "names those that may"
        )
    allowed = [root.expanduser().resolve() for root in roots]
    try:
        folder = Path(where).resolve()
        _check_beneath(folder, allowed)
        if not folder.is_dir():
            raise AdapterError("lora_path: there is no such folder")
        weights_file(folder)
        for name in FILES:
            with _opened(folder / name, allowed) as stream:
                _copy(stream, target / name, _limit(name, max_bytes))
    except AdapterError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        name = Path(str(error.filename)).name
        raise AdapterError(
            f"{name}: there is no such file in the adapter's folder"
            if name in FILES
            else "lora_path: there is no such folder"
        ) from None
    except (PermissionError, ValueError, RuntimeError):  # RuntimeError: links that go round in a circle
        raise AdapterError("lora_path: it cannot be read") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise AdapterError("lora_path: there is no such folder") from None
        raise SourceUnavailableError(f"lora_path: {error.strerror or 'it cannot be read'}") from error


def fetch_hub(repo: str, revision: str | None, scratch: Path, target: Path, max_bytes: int) -> str:
    """Download the two files of a repository of the Hugging Face hub, at one commit.

    Args:
        scratch: an empty folder for what the library keeps beside them.

    Returns:
        The commit.

    Raises:
        AdapterError: there is no such repository, revision or file, or it is too large or not open to this process.
        SourceUnavailableError: the hub is away, or asks to be asked later.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub import errors as hub

    try:
        info = HfApi().model_info(repo, revision=revision, timeout=_HUB_TIMEOUT_S, files_metadata=True)
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        _check_listing(sizes, max_bytes)
        if info.sha is None:
            raise SourceUnavailableError("lora_path: the hub does not say which commit this is")
        for name in FILES:
            path = hf_hub_download(repo, name, revision=info.sha, local_dir=scratch)
            with Path(path).open("rb") as stream:
                _copy(stream, target / name, _limit(name, max_bytes))
        return str(info.sha)
    except hub.GatedRepoError:
        raise AdapterError("lora_path: this repository asks for a token that may read it (HF_TOKEN)") from None
    except hub.RepositoryNotFoundError:
        raise _no_repository() from None
    except hub.RevisionNotFoundError:
        raise AdapterError("lora_path: the repository has no such revision") from None
    except hub.RemoteEntryNotFoundError:
        raise AdapterError("lora_path: the repository has no such file") from None
    except hub.HFValidationError:
        raise AdapterError("lora_path: this is no name of a repository") from None
    except hub.OfflineModeIsEnabled:
        raise AdapterError("lora_path: this process is not to ask the hub (HF_HUB_OFFLINE)") from None
    except hub.HfHubHTTPError as error:
        raise _refused(error.response.status_code) from None
    except (OSError, hub.HTTPError) as error:
        _log.warning("hub failed", error=type(error).__name__, exc_info=True)
        if isinstance(error, OSError) and error.errno in _DISK:
            raise SourceUnavailableError(f"the adapter's files cannot be kept: {error.strerror}") from None
        raise SourceUnavailableError(f"lora_path: the hub is not available: {type(error).__name__}") from None


def fetch(source: Source, store: AdapterStore, roots: Sequence[Path], work: Path, max_bytes: int) -> str | None:
    """Fetch a source to `work/adapter`; answers the commit of what came from the hub. Raises as the others here."""
    target = work / "adapter"
    target.mkdir()
    if source.kind == "folder":
        fetch_folder(source.where, roots, target, max_bytes)
    elif source.kind == "upload":
        store.fetch_upload(source.where, target)
    else:
        return fetch_hub(source.where, source.revision, work / "hub", target, max_bytes)
    return None


def _refused(status: int) -> RopewayError:
    """What is said of an answer of the hub that its library has no word for. Only what may pass is tried again."""
    if status == 404:
        return _no_repository()
    if 400 <= status < 500 and status not in _PASSING:
        return AdapterError(f"lora_path: the hub refuses this repository with status {status}")
    return SourceUnavailableError(f"lora_path: the hub is not available: it answers {status}")


def _no_repository() -> AdapterError:
    return AdapterError("lora_path: the hub has no such repository, or it is private (a folder is written from / on)")


def _check_listing(sizes: dict[str, int | None], max_bytes: int) -> None:
    if CONFIG_FILE not in sizes:
        raise AdapterError(f"{CONFIG_FILE}: the repository has no such file")
    if WEIGHTS_FILE not in sizes:
        if "adapter_model.bin" in sizes:
            raise AdapterError(f"adapter_model.bin: only safetensors are read; save the adapter as {WEIGHTS_FILE}")
        raise AdapterError(f"{WEIGHTS_FILE}: the repository has no such file")
    for name in FILES:
        size, most = sizes[name] or 0, _limit(name, max_bytes)
        if size > most:
            raise _too_large(name, most)


def _check_beneath(path: Path, allowed: Sequence[Path]) -> None:
    if not any(path.is_relative_to(root) for root in allowed):
        raise AdapterError("lora_path: it is not beneath a folder that may be read (adapter_roots)")


def _opened(path: Path, allowed: Sequence[Path]) -> IO[bytes]:
    """A regular file beneath an allowed folder; what was opened is looked at, not what the name meant before."""
    real = path.resolve(strict=True)
    _check_beneath(real, allowed)
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    stream = os.fdopen(descriptor, "rb")
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterError(f"{path.name}: it is not a regular file")
        behind = Path(f"/proc/self/fd/{descriptor}")
        if behind.exists():
            _check_beneath(Path(os.readlink(behind)), allowed)
    except BaseException:
        stream.close()
        raise
    return stream


def _copy(stream: IO[bytes], target: Path, most: int) -> None:
    copied = 0
    with target.open("xb") as out:
        while piece := stream.read(min(_PIECE, most + 1 - copied)):
            copied += len(piece)
            if copied > most:
                raise _too_large(target.name, most)
            out.write(piece)


def _limit(name: str, max_bytes: int) -> int:
    return MAX_CONFIG_BYTES if name == CONFIG_FILE else max_bytes


def _too_large(name: str, most: int) -> AdapterError:
    setting = "" if name == CONFIG_FILE else " (max_adapter_bytes)"
    return AdapterError(f"{name}: larger than the {most} bytes that are allowed{setting}")
