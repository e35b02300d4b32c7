"""The store of adapters: complete or not there, by content, in a folder and behind fsspec."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.adapter_store import AdapterStore, FolderStore, StoreUnavailableError, open_store
from shared.adapter_store.remote import RemoteStore
from shared.errors import AdapterError, InvalidRequestError
from shared.lora.files import FILES, WEIGHTS_FILE, content_identity
from shared.lora.peft_config import CONFIG_FILE

UPLOAD = "0123456789abcdef" * 2


def write_adapter(folder: Path, value: float = 1.0) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    save_file({"a": np.full(100, value, dtype=np.float32)}, folder / WEIGHTS_FILE)
    return content_identity(folder)


def put(store: AdapterStore, value: float = 1.0) -> str:
    with store.incoming() as folder:
        identity = write_adapter(folder, value)
        store.adopt(folder, identity)
    return identity


@pytest.fixture(params=["folder", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "store")
    return RemoteStore(f"local://{tmp_path}/store", tmp_path / "copies")


def test_what_is_adopted_is_found_by_its_content(store: AdapterStore, tmp_path: Path) -> None:
    one, other = put(store), put(store, 2.0)
    assert one != other and store.holds(one) and store.holds(other)
    for identity in (one, other):
        folder = store.folder(identity)
        assert content_identity(folder) == identity
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert {path.name for path in (tmp_path / "store").iterdir()} - {".incoming"} == {one, other}
    assert not list((tmp_path).rglob(".incoming/*")), "nothing half-made is left"


def test_adopting_again_changes_nothing(store: AdapterStore) -> None:
    identity = put(store)
    before = (store.folder(identity) / WEIGHTS_FILE).stat().st_mtime_ns
    assert put(store) == identity
    assert (store.folder(identity) / WEIGHTS_FILE).stat().st_mtime_ns == before


def test_what_was_damaged_is_made_good_by_adopting_it_again(store: AdapterStore, tmp_path: Path) -> None:
    identity = put(store)
    weights = tmp_path / "store" / identity / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-4])
    put(store)
    assert content_identity(tmp_path / "store" / identity) == identity


def test_what_is_not_there_may_come(store: AdapterStore) -> None:
    identity = "ab" * 16
    assert not store.holds(identity)
    with pytest.raises(StoreUnavailableError, match="not in the store") as caught:
        store.folder(identity)
    assert caught.value.status == 503 and caught.value.retry_after


def test_without_its_config_an_adapter_is_not_there(store: AdapterStore, tmp_path: Path) -> None:
    identity = put(store)
    (tmp_path / "store" / identity / CONFIG_FILE).unlink()
    assert not store.holds(identity)
    with pytest.raises(StoreUnavailableError):
        store.folder(identity)


@pytest.mark.parametrize(
    "identity", ["", "..", "../../etc", "/abs", "AB" * 16, "ab" * 15, "ab" * 16 + "\n", "ab/" * 11]
)
def test_nothing_but_an_identity_becomes_a_path(store: AdapterStore, identity: str) -> None:
    for call in (store.folder, store.holds, store.delete, store.discard_copy, store.drop_upload):
        if call == store.discard_copy and isinstance(store, FolderStore):
            continue
        with pytest.raises(ValueError, match="32 hexadecimal digits"):
            call(identity)
    with pytest.raises(ValueError, match="two files"):
        store.create_upload(UPLOAD, "../x")


def test_a_deleted_adapter_is_gone(store: AdapterStore) -> None:
    identity = put(store)
    store.folder(identity)
    store.delete(identity)
    store.delete(identity)
    assert not store.holds(identity)
    with pytest.raises(StoreUnavailableError):
        store.folder(identity)


def test_uploads_wait_until_they_are_fetched(store: AdapterStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    identity = write_adapter(source)
    for name in FILES:
        with store.create_upload(UPLOAD, name) as stream:
            stream.write((source / name).read_bytes())
    with store.incoming() as folder:
        store.fetch_upload(UPLOAD, folder)
        assert content_identity(folder) == identity
    store.drop_upload(UPLOAD)
    store.drop_upload(UPLOAD)
    with store.incoming() as folder, pytest.raises(AdapterError, match="upload it again"):
        store.fetch_upload(UPLOAD, folder)


def test_what_was_left_behind_is_swept_and_adapters_are_not(store: AdapterStore, tmp_path: Path) -> None:
    identity = put(store)
    with store.create_upload(UPLOAD, CONFIG_FILE) as stream:
        stream.write(b"{}")
    with store.incoming() as folder:
        store.sweep(3600)
        assert folder.is_dir()
        old = time.time() - 7200
        for path in [*(tmp_path / "store" / "uploads").rglob("*"), tmp_path / "store" / "uploads" / UPLOAD, folder]:
            os.utime(path, (old, old))
        store.sweep(3600)
        assert not folder.exists()
    with store.incoming() as empty, pytest.raises(AdapterError):
        store.fetch_upload(UPLOAD, empty)
    assert store.holds(identity)


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreUnavailableError, match="cannot be written"), FolderStore(tmp_path / "store").incoming():
        pass


def test_a_remote_copy_with_other_content_leaves_nothing(tmp_path: Path) -> None:
    store = RemoteStore(f"local://{tmp_path}/store", tmp_path / "copies")
    identity = put(store)
    write_adapter(tmp_path / "store" / identity, 3.0)
    with pytest.raises(AdapterError, match="others than their name says"):
        store.folder(identity)
    assert not (tmp_path / "copies" / identity).exists()
    assert not list((tmp_path / "copies" / ".incoming").iterdir())


def test_a_remote_adapter_is_copied_once_and_again_when_discarded(tmp_path: Path) -> None:
    store = RemoteStore(f"local://{tmp_path}/store", tmp_path / "copies")
    identity = put(store)
    assert store.folder(identity) == tmp_path / "copies" / identity
    (tmp_path / "store").rename(tmp_path / "away")
    assert content_identity(store.folder(identity)) == identity, "the store is not needed any more"
    store.discard_copy(identity)
    with pytest.raises(StoreUnavailableError):
        store.folder(identity)
    (tmp_path / "away").rename(tmp_path / "store")
    assert content_identity(store.folder(identity)) == identity


def test_copies_take_no_more_than_they_may(tmp_path: Path) -> None:
    url, copies = f"local://{tmp_path}/store", tmp_path / "copies"
    store = RemoteStore(url, copies)
    identities = [put(store, float(value)) for value in range(6)]
    each = sum(path.stat().st_size for path in store.folder(identities[0]).iterdir())
    store = RemoteStore(url, copies, most_bytes=2.5 * each)

    def there() -> set[int]:
        return {number for number, identity in enumerate(identities) if (copies / identity).exists()}

    for number in range(3):
        store.folder(identities[number])
    assert there() == {0, 1, 2}, "two beside the newest"
    store.folder(identities[0])
    store.folder(identities[3])
    assert there() == {0, 2, 3}, "used again, the first is no longer the oldest"
    assert content_identity(store.folder(identities[1])) == identities[1], "it is copied anew"
    assert there() == {0, 3, 1}
    assert not list((copies / ".incoming").iterdir())
    RemoteStore(url, copies, most_bytes=0).folder(identities[5])
    assert there() == {5}, "what is read now is always kept"


def _copy_in_process(url: str, copies: Path, identity: str) -> None:
    assert content_identity(RemoteStore(url, copies).folder(identity)) == identity


def test_processes_that_copy_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    url, copies = f"local://{tmp_path}/store", tmp_path / "copies"
    identity = put(RemoteStore(url, copies))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_copy_in_process, args=(url, copies, identity)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_a_setting_names_a_folder_or_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for setting in (None, str(tmp_path), f"file://{tmp_path}"):
        assert isinstance(open_store(setting), FolderStore)
    assert put(open_store(None)) in {path.name for path in (tmp_path / "ropeway" / "adapters").iterdir()}
    assert isinstance(open_store("memory://adapters", tmp_path), RemoteStore)
    with pytest.raises(InvalidRequestError, match="adapter_store"):
        open_store("nosuchkind://bucket")


def test_an_object_store_works_as_a_folder_does(tmp_path: Path) -> None:
    store = open_store("memory://bucket/adapters", tmp_path)
    identity = put(store)
    assert content_identity(store.folder(identity)) == identity
    store.delete(identity)
    assert not store.holds(identity)
