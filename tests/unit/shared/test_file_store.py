"""Contents of files in a folder and in an object store."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from shared.batches import made_file_id, new_batch_id, new_file_id
from shared.errors import InvalidRequestError, StoreUnavailableError
from shared.file_store import FileStore

PART = f"12-{'a' * 32}"


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "files") if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


def test_a_content_is_written_read_and_deleted(store: FileStore) -> None:
    file_id = new_file_id()
    with store.create(file_id) as stream:
        stream.write(b"first\n" + b"x" * 3_000_000)
        stream.write(b"\nlast")
    with store.open(file_id) as stream:
        assert stream.readline(100) == b"first\n"
        assert len(stream.readline(100)) == 100
        assert len(stream.readline()) == 3_000_000 - 100 + 1
        assert stream.read() == b"last"
    store.delete(file_id)
    store.delete(file_id)
    with pytest.raises(FileNotFoundError):
        store.open(file_id)


def test_parts_are_dropped_together(store: FileStore) -> None:
    batch, other = new_batch_id(), new_batch_id()
    store.write_part(batch, f"{PART}.out", b"a")
    store.write_part(other, f"{PART}.out", b"b")
    assert store.read_part(batch, f"{PART}.out") == b"a"
    assert store.read_part(batch, f"{PART}.err") == b""
    store.drop_parts(batch)
    store.drop_parts(batch)
    assert store.read_part(batch, f"{PART}.out") == b""
    assert store.read_part(other, f"{PART}.out") == b"b"


@pytest.mark.parametrize("name", ["../x", "file-" + "A" * 32, "file-" + "a" * 31, f"file-{'a' * 32}/..", ""])
def test_only_ids_are_names(store: FileStore, name: str) -> None:
    for call in (store.create, store.open, store.delete):
        with pytest.raises(ValueError, match="no name"):
            call(name)
    for part in (f"{name}.out", f"{PART}.txt", f"../{PART}.out"):
        with pytest.raises(ValueError, match="no name"):
            store.write_part(new_batch_id(), part, b"")


def test_a_store_that_cannot_be_written_is_away(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(StoreUnavailableError, match="not available"):
        FileStore(str(tmp_path / "taken")).create(new_file_id())


def test_an_unknown_kind_of_store() -> None:
    with pytest.raises(InvalidRequestError, match="files_store"):
        FileStore("nosuch://x")


def test_an_output_has_the_same_id_however_often_it_is_made() -> None:
    batch = new_batch_id()
    assert made_file_id(batch, "out") == made_file_id(batch, "out") != made_file_id(batch, "err")
