"""What may be read of a source, and what of it is copied."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from shared.errors import AdapterError, InvalidRequestError
from shared.lora.source import Source, parse_source, upload_source
from tasks.fetch import SourceUnavailableError, fetch_folder, fetch_hub
from tests.support.fake_hub import fake_hub

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "roots" / "a"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes(b"{}")
    (folder / WEIGHTS).write_bytes(b"w" * 10)
    (folder / "other.py").write_bytes(b"x")
    return [tmp_path / "roots"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_two_files_are_copied_and_no_others(roots: list[Path], target: Path) -> None:
    fetch_folder(str(roots[0] / "a"), roots, target, 10)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {CONFIG: b"{}", WEIGHTS: b"w" * 10}


def test_links_within_the_allowed_folders_are_followed(roots: list[Path], target: Path) -> None:
    """As the hub's cache has them."""
    blob = roots[0] / "blob"
    (roots[0] / "a" / WEIGHTS).rename(blob)
    (roots[0] / "a" / WEIGHTS).symlink_to("../blob")
    (roots[0] / "again").symlink_to(roots[0] / "a")
    fetch_folder(str(roots[0] / "again"), roots, target, 10)
    assert (target / WEIGHTS).read_bytes() == b"w" * 10


@pytest.mark.parametrize("where", ["..", "a/../..", "../target", "/etc", "/", "a/../../target", "out"])
def test_nothing_outside_is_read(roots: list[Path], target: Path, tmp_path: Path, where: str) -> None:
    (roots[0] / "out").symlink_to(tmp_path)
    with pytest.raises(AdapterError, match="adapter_roots"):
        fetch_folder(os.path.join(roots[0], where), roots, target, 10)
    with pytest.raises(AdapterError, match="ROPEWAY_ADAPTER_ROOTS"):
        fetch_folder(str(roots[0] / "a"), [], target, 10)


def test_files_that_lead_outside_are_not_read(roots: list[Path], target: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for name in (CONFIG, WEIGHTS):
        (roots[0] / "a" / name).unlink()
        (roots[0] / "a" / name).symlink_to(tmp_path / "secret")
        with pytest.raises(AdapterError, match="adapter_roots"):
            fetch_folder(str(roots[0] / "a"), roots, target, 10)
        (roots[0] / "a" / name).unlink()
        (roots[0] / "a" / name).write_text("{}")
        for path in target.iterdir():
            assert "secret" not in path.read_text()
            path.unlink()


def test_a_pipe_is_not_waited_for(roots: list[Path], target: Path) -> None:
    (roots[0] / "a" / CONFIG).unlink()
    os.mkfifo(roots[0] / "a" / CONFIG)
    with pytest.raises(AdapterError, match="not a regular file"):
        fetch_folder(str(roots[0] / "a"), roots, target, 10)


@pytest.mark.parametrize(("name", "size"), [(WEIGHTS, 11), (CONFIG, 300_000)])
def test_what_is_too_large_is_not_copied_further(roots: list[Path], target: Path, name: str, size: int) -> None:
    (roots[0] / "a" / name).write_bytes(bytes(size))
    with pytest.raises(AdapterError, match=f"{name}: larger than"):
        fetch_folder(str(roots[0] / "a"), roots, target, 10)


def test_links_in_a_circle_and_absent_files(roots: list[Path], target: Path) -> None:
    (roots[0] / "loop").symlink_to(roots[0] / "loop")
    for where, named in (
        ("loop", "cannot be read"), ("absent", "no such folder"), ("a/" + CONFIG, "no such folder"),
        ("a" * 300, "no such folder"),
    ):  # fmt: skip
        with pytest.raises(AdapterError, match=named):
            fetch_folder(str(roots[0] / where), roots, target, 10)
    (roots[0] / "a" / CONFIG).unlink()
    with pytest.raises(AdapterError, match=f"{CONFIG}: there is no such file"):
        fetch_folder(str(roots[0] / "a"), roots, target, 10)


@pytest.mark.parametrize(
    ("status", "error", "named"),
    [
        (400, AdapterError, "status 400"),
        (403, AdapterError, "status 403"),
        (404, AdapterError, "no such repository"),
        (410, AdapterError, "status 410"),
        (429, SourceUnavailableError, "not available: it answers 429"),
        (500, SourceUnavailableError, "not available: it answers 500"),
        (503, SourceUnavailableError, "not available: it answers 503"),
        (None, SourceUnavailableError, "not available: ConnectError"),
    ],
)
def test_only_what_may_pass_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, target: Path, status: int | None, error: type[Exception], named: str
) -> None:
    """A status without a word of the hub's own, as mirrors and proxies answer it; None: nobody listens."""
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url if status else "http://127.0.0.1:9")
        hub.refuses["org/sql"] = status or 0
        with pytest.raises(error, match=named):
            fetch_hub("org/sql", None, target, target, 10)
        assert sum("/models/" in path for path in hub.asked) == (status is not None)


def test_a_hub_that_must_not_be_asked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AdapterError, match="HF_HUB_OFFLINE"):
        fetch_hub("org/sql", None, target, target, 10)


def test_a_full_disk_is_not_the_hub_s_fault(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HfApi, "model_info", full)
    with pytest.raises(SourceUnavailableError, match="cannot be kept: No space left"):
        fetch_hub("org/sql", None, target, target, 10)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("/srv/a", Source("folder", "/srv/a")),
        ("org/name", Source("hub", "org/name")),
        ("hf:org/na.me_-1", Source("hub", "org/na.me_-1")),
        ("hf:org/name@refs/pr/3", Source("hub", "org/name", "refs/pr/3")),
        ("org/name@" + "a" * 40, Source("hub", "org/name", "a" * 40)),
    ],
)
def test_sources(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "a/b/c", "../x", "./x", "~/x", "http://h/a", "https:a/b", "s3://b/a", "file:///a", "file:a/b"),
        *("/name\x00", "/a\nb", "org/", "org/name@", "org/name@../x", "org/name@-x", "-org/name", "org/.name"),
        *("org/na--me", "org/name.", "hf:/abs", "hf:http://x", "hf:", upload_source("0" * 32), "/" + "x" * 5000),
    ],
    ids=lambda text: repr(text)[:40],
)
def test_what_is_no_source(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_source(text)
    assert caught.value.param == "lora_path"


def test_uploads_are_for_the_server_alone() -> None:
    text = upload_source("0123456789abcdef" * 2)
    assert parse_source(text, uploads=True) == Source("upload", "0123456789abcdef" * 2)
    for wrong in (text + "0", text[:-1], "upload:../x", "upload:" + "G" * 32):
        with pytest.raises(InvalidRequestError):
            parse_source(wrong, uploads=True)
