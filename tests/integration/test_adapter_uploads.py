"""Adapters as multipart forms: written to the store as they come, bounded, and nothing left of what is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest

from gateway.app import create_app
from ropeway.client import APIError, AsyncClient, Client
from shared.adapter_store import FolderStore
from shared.settings import GatewaySettings
from tests.integration.gateway_harness import Gateway, serve
from tests.support.adapter_tasks import TARGETS, tasks, write_adapter
from tests.unit.gateway import support

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
async def gateway(valkey_url: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    settings: dict[str, Any] = {"adapter_store": str(tmp_path / "store"), "max_adapter_bytes": 100_000}
    async with serve(valkey_url, card=support.card(max_lora_rank=16), **settings) as gateway:
        await gateway.store.put_targets(support.MODEL, TARGETS)
        yield gateway


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in write_adapter(tmp_path / "source").iterdir()}


def form(files: dict[str, bytes], **names: str) -> list[tuple[str, tuple[str, bytes]]]:
    """Parts whose names say nothing."""
    return [(names.get(file, "files"), (file, data)) for file, data in files.items()]


def uploads(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


async def test_a_form_is_loaded_and_its_upload_is_gone(
    gateway: Gateway, files: dict[str, bytes], valkey_url: str, tmp_path: Path
) -> None:
    with tasks(valkey_url, tmp_path):
        data = {"lora_name": "org/sql", "pin": "true"}
        answer = await gateway.http.post("/v1/adapters?wait=30", data=data, files=form(files))
        assert answer.status_code == 200, answer.text
        shown = answer.json()
        assert (shown["id"], shown["state"], shown["pinned"]) == ("org/sql", "registered", True)
        kept = tmp_path / "store" / shown["identity"]
        assert {path.name: path.read_bytes() for path in kept.iterdir()} == files
        async with asyncio.timeout(10):
            while len(uploads(tmp_path)) > 2:
                await asyncio.sleep(0.05)
        parts = {CONFIG: (CONFIG, files[CONFIG]), WEIGHTS: ("blob", files[WEIGHTS])}
        again = await gateway.http.post("/v1/adapters?wait=30", data={"lora_name": "b"}, files=parts)
        assert again.json()["identity"] == shown["identity"], "a part's own name will do"


async def test_the_clients_upload(gateway: Gateway, valkey_url: str, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    with tasks(valkey_url, tmp_path):
        async with AsyncClient(gateway.url) as client:
            adapter = await client.load_adapter("sql", source, wait_s=30)
            assert (adapter.name, adapter.state, adapter.error) == ("sql", "registered", None)
            assert [each.name for each in await client.adapters()] == ["sql"]
            assert (await client.adapter("sql")).data == adapter.data
            with pytest.raises(APIError, match="already been loaded"):
                await client.load_adapter("sql", source)
            assert await client.unload_adapter("sql") == 0
            with pytest.raises(APIError, match="cannot be found"):
                await client.adapter("sql")

        def blocking() -> str:
            with Client(gateway.url) as client:
                return client.load_adapter("a/b", source, pin=True, replace=True, wait_s=30).name

        assert await asyncio.to_thread(blocking) == "a/b"
        for arguments, expected in (
            (["load", "cli", str(source)], "cli is registered"),
            (["list"], "a/b (pinned)"),
            (["show", "a/b"], '"id": "a/b"'),
            (["unload", "cli"], "cli is unloaded"),
        ):
            command = [sys.executable, "-m", "ropeway", "adapters", *arguments, "--url", gateway.url]
            ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            assert ran.returncode == 0 and expected in ran.stdout, ran


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({CONFIG: None}, 400, CONFIG),
        ({WEIGHTS: None}, 400, WEIGHTS),
        ({"adapter_model.bin": b"x"}, 400, "only safetensors"),
        ({"../../etc/passwd": b"x"}, 400, "and no others"),
        ({WEIGHTS: bytes(100_001)}, 413, "100000 bytes"),
        ({WEIGHTS: bytes(1_300_000)}, 413, "larger"),
        ({CONFIG: bytes(300_000)}, 413, CONFIG),
    ],
    ids=str,
)
async def test_a_form_is_refused_and_leaves_nothing(
    gateway: Gateway, files: dict[str, bytes], tmp_path: Path, change: dict[str, bytes | None], status: int, named: str
) -> None:
    sent = {name: data for name, data in (files | change).items() if data is not None}
    answer = await gateway.http.post("/v1/adapters", data={"lora_name": "sql"}, files=form(sent))
    assert answer.status_code == status and named in answer.json()["error"]["message"], answer.text
    assert uploads(tmp_path) == []
    assert (await gateway.http.get("/v1/adapters")).json()["data"] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "../x"}, "lora_name"),
        ({"lora_name": "x", "pin": "perhaps"}, "pin"),
        ({"lora_name": "x", "lora_path": "/x"}, "lora_path"),
        ({"lora_name": "x", "base_model": "other"}, "base_model"),
        ({"lora_name": support.MODEL}, "lora_name"),
        ({"lora_name": "x" * 9000}, None),
        ({"Strange Name!": "x"}, None),
    ],
    ids=str,
)
async def test_fields_of_a_form_are_checked(
    gateway: Gateway, files: dict[str, bytes], tmp_path: Path, fields: dict[str, str], param: str | None
) -> None:
    answer = await gateway.http.post("/v1/adapters", data=fields, files=form(files))
    assert answer.status_code in (400, 404, 413) and answer.json()["error"]["param"] == param, answer.text
    assert uploads(tmp_path) == []


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"garbage"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="lora_name"\r\n\r\nsql'),
        ("multipart/form-data; boundary=b", b"--b\r\nX: " + b"y" * 10_000 + b"\r\n\r\n"),
        ("multipart/form-data; boundary=" + "b" * 3000, b"x"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_bytes_that_are_no_form(gateway: Gateway, tmp_path: Path, content_type: str, body: bytes) -> None:
    answer = await gateway.http.post("/v1/adapters", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400, answer.text
    assert uploads(tmp_path) == []


async def test_a_name_that_is_in_use_leaves_no_upload(
    gateway: Gateway, files: dict[str, bytes], valkey_url: str, tmp_path: Path
) -> None:
    with tasks(valkey_url, tmp_path):
        data = {"lora_name": "sql"}
        assert (await gateway.http.post("/v1/adapters?wait=30", data=data, files=form(files))).status_code == 200
        answer = await gateway.http.post("/v1/adapters", data=data, files=form(files))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_loaded")
        async with asyncio.timeout(10):
            while [path for path in uploads(tmp_path) if "uploads" in path.parts]:
                await asyncio.sleep(0.02)


async def test_what_was_uploaded_for_a_load_that_nobody_waits_for_is_gone_at_once(
    gateway: Gateway, files: dict[str, bytes], tmp_path: Path
) -> None:
    """No tasks process is there to find out."""
    kept = []
    for _ in range(3):
        data = {"lora_name": "sql", "load_inplace": "true"}
        assert (await gateway.http.post("/v1/adapters", data=data, files=form(files))).status_code == 202
        (folder,) = {path.parent for path in uploads(tmp_path)}
        kept.append(folder)
    assert len(set(kept)) == 3, "each time the newest"
    assert (await gateway.http.delete("/v1/adapters/sql")).status_code == 200
    assert uploads(tmp_path) == []


@pytest.mark.parametrize("size", [100, 90_000], ids=["found out on closing", "found out on writing"])
async def test_a_full_disk_is_told_and_leaves_nothing(
    gateway: Gateway, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    create = FolderStore.create_upload

    def full(store: FolderStore, upload: str, file: str) -> IO[bytes]:
        opened = create(store, upload, file)
        if file == CONFIG:
            return opened
        opened.close()
        return open("/dev/full", "wb")

    monkeypatch.setattr(FolderStore, "create_upload", full)
    sent = files | {WEIGHTS: bytes(size)}
    answer = await gateway.http.post("/v1/adapters", data={"lora_name": "sql"}, files=form(sent))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_store_unavailable"), answer.text
    assert "No space left" in answer.json()["error"]["message"]
    assert uploads(tmp_path) == []


async def test_a_client_that_goes_away_leaves_nothing(
    gateway: Gateway, files: dict[str, bytes], tmp_path: Path
) -> None:
    started = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="f"; filename="adapter_config.json"\r\n\r\n{}\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="f"; filename="adapter_model.safetensors"\r\n\r\n'
        started.set()
        await asyncio.sleep(60)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    request = asyncio.create_task(gateway.http.post("/v1/adapters", content=body(), headers=headers))
    await started.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    async with asyncio.timeout(10):
        while uploads(tmp_path):
            await asyncio.sleep(0.02)


async def test_a_large_upload_is_not_held_in_memory(valkey_url: str, tmp_path: Path) -> None:
    """The body is larger than what may be added to this process's memory."""
    size = 96 * 2**20
    before = psutil.Process().memory_info().rss

    async def body() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="lora_name"\r\n\r\nsql\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="f"; filename="adapter_config.json"\r\n\r\n{}\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="f"; filename="adapter_model.safetensors"\r\n\r\n'
        for _ in range(size // 2**16):
            yield bytes(2**16)
        yield b"\r\n--b--\r\n"

    settings: dict[str, Any] = {"adapter_store": str(tmp_path / "store")}
    async with serve(valkey_url, card=support.card(max_lora_rank=16), **settings) as gateway:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await gateway.http.post("/v1/adapters", content=body(), headers=headers)
        assert answer.status_code == 202, answer.text
        assert sum(path.stat().st_size for path in uploads(tmp_path)) == size + 2
        assert psutil.Process().memory_info().rss - before < size / 2
        await gateway.http.delete("/v1/adapters/sql")


async def test_json_bodies_keep_their_limit(gateway: Gateway) -> None:
    body = json.dumps({"lora_name": "x", "lora_path": "/" + "x" * 9_000_000})
    headers = {"content-type": "application/json"}
    answer: httpx.Response = await gateway.http.post("/v1/adapters", content=body, headers=headers)
    assert answer.status_code == 413


def test_the_document_has_the_routes() -> None:
    paths = create_app(GatewaySettings()).openapi()["paths"]
    assert {"/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"} <= paths.keys()
