"""Adapters over HTTP where a deployment is not as it should be, or not open to everybody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.gateway_harness import Gateway, chat, serve
from tests.support.adapter_tasks import TARGETS, tasks, write_adapter
from tests.unit.gateway import support

MODEL = support.MODEL


def source(folder: Path, name: str = "one") -> str:
    return str(write_adapter(folder / "roots" / name))


async def load(gateway: Gateway, name: str, path: str, **more: Any) -> httpx.Response:
    return await gateway.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


async def test_pools_that_serve_no_adapters_say_so(valkey_url: str) -> None:
    async with serve(valkey_url) as gateway:
        answer = await load(gateway, "sql", "/x")
        assert answer.status_code == 400 and "ROPEWAY_ENABLE_LORA" in answer.json()["error"]["message"]
        answer = await load(gateway, "sql", "/x", base_model="no-such")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "base_model")


async def test_without_a_tasks_process_the_load_waits_and_says_so(valkey_url: str, tmp_path: Path) -> None:
    async with serve(valkey_url, card=support.card(max_lora_rank=16), adapter_wait_s=0.3) as gateway:
        await gateway.store.put_targets(MODEL, TARGETS)
        path = source(tmp_path)
        answer = await load(gateway, "sql", path)
        assert answer.status_code == 503 and "ropeway tasks" in answer.json()["error"]["message"]
        shown = (await gateway.http.get("/v1/adapters/sql")).json()
        assert shown["state"] == "loading" and "ropeway tasks" in shown["error"]
        answer = await gateway.http.post("/v1/chat/completions", json=chat(model="sql"))
        assert answer.status_code == 404 and "still being loaded" in answer.json()["error"]["message"]
        with tasks(valkey_url, tmp_path):
            async with asyncio.timeout(20):
                while (await gateway.http.get("/v1/adapters/sql")).json()["state"] != "registered":
                    await asyncio.sleep(0.05)


async def test_a_limit_on_names(valkey_url: str, tmp_path: Path) -> None:
    card = support.card(max_lora_rank=16)
    with tasks(valkey_url, tmp_path):
        async with serve(valkey_url, card=card, max_adapters=1) as gateway:
            await gateway.store.put_targets(MODEL, TARGETS)
            assert (await load(gateway, "one", source(tmp_path))).status_code == 200
            answer = await load(gateway, "two", source(tmp_path))
            assert answer.status_code == 429 and "max_adapters" in answer.json()["error"]["message"]
            assert (await load(gateway, "one", source(tmp_path), load_inplace=True)).status_code == 200


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, None, 404),
        ({"host": "0.0.0.0"}, None, 403),
        ({"host": "::1"}, None, 404),
        ({"api_keys": ["user"]}, "user", 403),
        ({"admin_api_keys": ["root"]}, None, 401),
        ({"admin_api_keys": ["root"]}, "user", 401),
        ({"admin_api_keys": ["root"], "host": "0.0.0.0"}, "root", 404),
        ({"api_keys": ["user"], "admin_api_keys": ["root"]}, "user", 403),
        ({"api_keys": ["user"], "admin_api_keys": ["root"]}, "root", 404),
        ({"api_keys": ["user"], "admin_api_keys": ["root"]}, "roo", 401),
    ],
)
async def test_only_administrators_change_adapters(
    valkey_url: str, settings: dict[str, Any], key: str | None, status: int
) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with serve(valkey_url, **settings) as gateway:
        http = gateway.http
        calls = [
            http.post("/v1/unload_lora_adapter", json={"lora_name": "x"}, headers=headers),
            http.delete("/v1/adapters/x", headers=headers),
        ]
        if status != 404:
            calls += [
                http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/x"}, headers=headers),
                http.post("/v1/adapters", json={"lora_name": "x", "lora_path": "/x"}, headers=headers),
                http.post("/v1/adapters", files={"f": ("adapter_config.json", b"{}")}, headers=headers),
            ]
        for answer in await asyncio.gather(*calls):
            assert answer.status_code == status, answer.text
            if status == 403:
                error = answer.json()["error"]
                assert ("Missing scopes: admin" if key else "ROPEWAY_ADMIN_API_KEYS") in error["message"]
                assert (error["type"], error["code"]) == (
                    "permission_error", "missing_scope" if key else "admin_key_required"
                )  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
        ({"host": "[broken"}, 403),
        ({"host": "localhost:8000"}, 404),
        ({"host": "[::1]:8000"}, 404),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 404),
    ],
    ids=str,
)
async def test_without_keys_no_page_of_a_browser_changes_adapters(
    valkey_url: str, headers: dict[str, str], status: int
) -> None:
    async with serve(valkey_url) as gateway:
        body = {"lora_name": "x"}
        answer = await gateway.http.post("/v1/unload_lora_adapter", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert (await gateway.http.get("/v1/adapters", headers=headers)).status_code == 200
