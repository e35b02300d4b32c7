"""Keys that operators make: what they open, where, until when, and where they never are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from gateway.scopes import TABLE
from shared import keys
from shared.access import Access
from shared.batch_record import encode
from shared.errors import NotFoundError
from tests.integration.gateway_harness import running, serve
from tests.integration.test_gateway_http import everything
from tests.support.keys import NEVER, access_to, bearer, make, submit, until
from tests.support.logged import logged
from tests.support.redis_server import RedisServer
from tests.unit.gateway import support

MODEL = support.MODEL


@pytest.fixture
async def access(redis_url: str) -> AsyncIterator[Access]:
    async with access_to(redis_url) as access:
        yield access


async def ask(http: httpx.AsyncClient, key: str | None, path: str = "/v1/models", method: str = "GET") -> int:
    return (await http.request(method, path, headers=bearer(key))).status_code


@pytest.mark.topologies
async def test_a_key_opens_its_tenants_jobs_and_nobody_elses(access: Access, redis_url: str) -> None:
    async with serve(redis_url, require_keys=True) as g:
        (one, _), (two, _), (other, _) = [await make(access, name) for name in ("acme", "acme", "other")]
        for wrong in (None, "nonsense", one[:-1], one + "x", one.lower(), f"rw-{'a' * 12}-{'b' * 43}"):
            answer = await g.http.get("/v1/models", headers=bearer(wrong))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
            assert error["type"] == "invalid_request_error"
            assert wrong is None or wrong not in answer.text
        job = (await submit(g, one)).json()["id"]
        assert await ask(g.http, two, f"/v1/jobs/{job}") == 200
        assert await ask(g.http, other, f"/v1/jobs/{job}") == 404
        assert [await ask(g.http, None, path) for path in ("/health", "/ready")] == [200, 200]
        envelope = (await g.worker.pull()).job.envelope
        assert envelope.tenant == "acme" and envelope.key == one.split("-")[1]


@pytest.mark.parametrize("scopes", [["inference"], ["admin"], ["metrics"], ["admin", "metrics"]])
async def test_a_key_opens_what_its_scopes_say_and_is_told_the_scope_that_it_lacks(
    valkey_url: str, scopes: list[str]
) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, require_keys=True) as g:
        key, _ = await make(access, "acme", *scopes)
        for (method, template), needed in TABLE.items():
            path = re.sub(r"\{[^}]*\}", "x", template)
            if "{pool}" in template:
                path = template.replace("{pool}", MODEL)
            answer = await g.http.request(method, path, headers=bearer(key))
            opened = not needed or bool(needed & set(scopes))
            assert (answer.status_code == 403) != opened, (method, template, answer.status_code, answer.text)
            if not opened:
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("permission_error", "missing_scope")
                assert error["message"].endswith(f"Missing scopes: {' or '.join(sorted(needed or ()))}")
            assert (await g.http.request(method, path)).status_code == (401 if needed is not None else 200)


@pytest.mark.topologies
async def test_a_revoked_key_is_closed_at_every_gateway_at_once(access: Access, redis_url: str) -> None:
    async with (
        serve(redis_url, **NEVER) as g,
        running(redis_url, **NEVER) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as second,
    ):
        key, record = await make(access)
        assert [await ask(http, key) for http in (g.http, second)] == [200, 200]
        await access.revoke_key(record.id)
        await until(lambda: _is(ask(g.http, key), 401))
        await until(lambda: _is(ask(second, key), 401))
        assert (await access.revoke_key(record.id)).revoked_ms, "harmless to repeat"
        with pytest.raises(NotFoundError):
            await access.revoke_key("a" * 12)


async def _is(answer: Awaitable[int], status: int) -> bool:
    return await answer == status


async def test_without_a_message_a_revocation_holds_soon(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, require_keys=True, key_cache_s=0.2) as g:
        key, record = await make(access)
        assert await ask(g.http, key) == 200
        revoked = msgspec.structs.replace(record, revoked_ms=1)
        await access._ask("HSET", keys.access("keys"), record.id, encode(revoked))
        await until(lambda: _is(ask(g.http, key), 401))


async def test_messages_that_were_missed_while_the_connection_was_lost(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, **NEVER) as g:
        key, record = await make(access)
        assert await ask(g.http, key) == 200
        connection = g.services.hub._connection
        assert connection is not None
        revoked = msgspec.structs.replace(record, revoked_ms=1)
        await access._ask("HSET", keys.access("keys"), record.id, encode(revoked))
        await connection.disconnect(nowait=True)
        await until(lambda: _is(ask(g.http, key), 401))


async def test_messages_of_anybody_do_no_harm(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, **NEVER) as g:
        key, record = await make(access)
        for message in (b"", b"\xc1", msgspec.msgpack.encode({"op": "dance"}), msgspec.msgpack.encode([record.id])):
            await access._ask("PUBLISH", keys.access("ctl"), message)
            assert await ask(g.http, key) == 200
        assert g.services.hub.alive


async def test_a_rotated_key_goes_on_for_its_grace(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, **NEVER) as g:
        old, record = await access.create_key("acme", ["inference", "metrics"], name="app", expires_s=1000)
        new, fresh, ended = await access.rotate_key(record.id, grace_s=0.5)
        assert (fresh.tenant, fresh.scopes, fresh.name) == ("acme", ["inference", "metrics"], "app")
        assert fresh.expires_ms - fresh.created_ms == 1_000_000 and ended.replaced_by == fresh.id
        assert await ask(g.http, new) == await ask(g.http, new, "/metrics") == 200
        await until(lambda: _is(ask(g.http, old), 401))
        assert await ask(g.http, new) == 200


async def test_through_an_outage_known_keys_go_on_and_others_are_told_to_come_again() -> None:
    server = RedisServer()
    server.start()
    settings: dict[str, Any] = {"require_keys": True, "key_cache_s": 0.1, "api_keys": ["static"]}
    try:
        async with (
            access_to(server.url) as access,
            running(server.url, key_outage_s=60, **settings) as (url, _),
            running(server.url, key_outage_s=0.2, **settings) as (short, _),
            httpx.AsyncClient(timeout=60) as http,
        ):
            (known, _), (unknown, _) = await make(access), await make(access)
            # A page that needs no Redis.
            assert await ask(http, known, f"{url}/docs") == await ask(http, known, f"{short}/docs") == 200
            server.kill()
            await asyncio.sleep(0.3)
            assert [await ask(http, known, f"{url}/docs") for _ in range(3)] == [200] * 3
            assert await ask(http, "static", f"{url}/docs") == 200
            for key, base in ((unknown, url), (known, short)):
                answer = await http.get(f"{base}/docs", headers=bearer(key))
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
                assert "retry-after" in answer.headers
            assert await ask(http, "nonsense", f"{url}/docs") == 401
    finally:
        server.close()


async def test_keys_of_the_settings_go_on_beside_them(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, api_keys=["static"]) as g:
        key, _ = await make(access)
        assert await ask(g.http, "static") == await ask(g.http, key) == 200
        assert await ask(g.http, None) == 401


@asynccontextmanager
async def monitor(url: str) -> AsyncIterator[bytearray]:
    """Every command that a single server gets meanwhile."""
    heard = bytearray()
    if not (place := re.fullmatch(r"redis://([\d.]+):(\d+)/0", url)):
        yield heard
        return
    reader, writer = await asyncio.open_connection(place[1], int(place[2]))
    writer.write(b"MONITOR\r\n")
    await reader.readline()

    async def listen() -> None:
        while data := await reader.read(65536):
            heard.extend(data)

    listening = asyncio.create_task(listen())
    yield heard
    listening.cancel()
    writer.close()


async def test_a_key_is_nowhere_but_with_its_owner(
    valkey_url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a log of any level, not in an answer, not in Redis nor in a command for it."""
    answers = ""
    with logged("debug"):
        async with (
            monitor(valkey_url) as commands,
            access_to(valkey_url) as access,
            serve(valkey_url, require_keys=True) as g,
        ):
            key, record = await make(access)
            new, _, _ = await access.rotate_key(record.id, grace_s=60)
            secrets = [key.split("-")[2], new.split("-")[2], "wrong-key-altogether"]
            for given in (key, new, "wrong-key-altogether", key[:-1] + "~", f"{key} {new}"):
                for path in ("/v1/models", "/metrics", "/v1/jobs/x"):
                    answers += (await g.http.get(path, headers=bearer(given))).text
            await submit(g, new)
            await (await g.worker.pull()).answer("x")
            await access.revoke_key(record.id)
            stored = await everything(g)
        assert record.id.encode() in commands or "+" in valkey_url
    written = capfd.readouterr()
    for secret in secrets:
        assert secret not in written.out + written.err + answers
        assert secret.encode() not in stored + commands
    assert record.id in written.err and record.digest not in written.err, "the public id is what logs have"


async def test_an_open_gateway_says_so_once_and_louder_where_keys_were_made(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []

    class Log:
        def __getattr__(self, level: str) -> Callable[..., None]:
            return lambda event, **_: said.append((level, event))

    monkeypatch.setattr("gateway.access.log", Log())
    async with serve(valkey_url) as g:
        await until(lambda: _true(bool(said)))
        assert await ask(g.http, None) == await ask(g.http, "whatever") == 200
        assert said == [("warning", "gateway.open")]
        async with access_to(valkey_url) as access:
            await make(access)
            await make(access)
        await until(lambda: _true(len(said) > 1))
        assert await ask(g.http, None) == 200
    assert said == [("warning", "gateway.open"), ("error", "gateway.open_despite_keys")]
    said.clear()
    async with serve(valkey_url, require_keys=True):
        pass
    assert said == []
    async with running(valkey_url):
        await until(lambda: _true(len(said) == 2))
    assert said == [("warning", "gateway.open"), ("error", "gateway.open_despite_keys")]


async def _true(value: bool) -> bool:
    return value


async def test_no_path_with_a_line_feed_passes_by_the_scopes(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, require_keys=True) as g:
        key, _ = await make(access)
        for method, path in (("GET", "/metrics"), ("GET", "/v1/pools"), ("POST", "/v1/load_lora_adapter")):
            assert (await g.http.request(method, path, headers=bearer(key))).status_code == 403
            response = await g.http.request(method, path + "%0A", headers=bearer(key))
            assert response.status_code == 400 and "control characters" in response.json()["error"]["message"]
    async with serve(valkey_url) as g:
        assert (await g.http.post("/v1/load_lora_adapter%0A", json={})).status_code == 400
