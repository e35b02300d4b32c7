"""`ropeway keys` and `ropeway tenants` against a real server and a live gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from ropeway import cli
from shared.api_keys import presented
from tests.integration.gateway_harness import Gateway, serve
from tests.support.keys import NEVER, access_to, bearer, submit, until


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The gateway is in this process: what it logs while a command runs would be taken for the command's output."""
    with capture_logs():
        yield


async def command(url: str, *arguments: str) -> Result:
    def call() -> Result:
        return CliRunner().invoke(cli.app, [*arguments, "--redis", url], env={"COLUMNS": "250", "NO_COLOR": "1"})

    return await asyncio.to_thread(call)


async def made(url: str, *arguments: str) -> str:
    """A key that a command printed: alone on standard output."""
    result = await command(url, "keys", *arguments)
    assert result.exit_code == 0, result.output
    key = result.stdout.removesuffix("\n")
    assert presented(key.encode()) is not None
    assert "shown this once" in result.stderr and key not in result.stderr
    return key


async def listed(url: str, *arguments: str) -> list[dict[str, Any]]:
    return list(json.loads((await command(url, "keys", "list", "--json", *arguments)).stdout))


async def status(gateway: Gateway, key: str, path: str = "/v1/models") -> int:
    return (await gateway.http.get(path, headers=bearer(key))).status_code


async def test_a_key_from_its_making_to_its_end(valkey_url: str) -> None:
    async with serve(valkey_url, **NEVER) as g:
        key = await made(
            valkey_url, "create", "--tenant", "acme", "--scope", "inference", "--scope", "metrics", "--name", "app",
            "--expires", "90d",
        )  # fmt: skip
        assert await status(g, key) == await status(g, key, "/metrics") == 200
        (shown,) = await listed(valkey_url)
        assert (shown["tenant"], shown["scopes"], shown["name"]) == ("acme", ["inference", "metrics"], "app")
        one = json.loads((await command(valkey_url, "keys", "show", shown["id"])).stdout)
        assert one == shown and "digest" not in one
        table = (await command(valkey_url, "keys", "list")).stdout
        assert shown["id"] in table and key not in table

        new = await made(valkey_url, "rotate", shown["id"], "--grace", "1h")
        assert await status(g, key) == await status(g, new) == 200
        assert [k["replaced_by"] for k in await listed(valkey_url, "--tenant", "acme")] == [new.split("-")[1], None]
        again = await command(valkey_url, "keys", "rotate", shown["id"])
        assert again.exit_code == 1 and "rotated to" in again.stderr

        result = await command(valkey_url, "keys", "revoke", shown["id"])
        assert result.exit_code == 0 and "revoked" in result.stdout

        async def closed() -> bool:
            return await status(g, key) == 401

        await until(closed)
        assert await status(g, new) == 200
        assert [k["state"] for k in await listed(valkey_url, "--all")] == ["revoked", "active"]
        assert len(await listed(valkey_url)) == 1 and await listed(valkey_url, "--tenant", "other") == []


async def test_whoever_makes_a_key_hears_whether_the_gateway_asks_for_it(valkey_url: str) -> None:
    async def heard(url: str) -> str:
        result = await command(valkey_url, "keys", "create", "--tenant", "acme", "--url", url)
        assert result.exit_code == 0 and result.stdout.startswith("rw-")
        return result.stderr

    async with serve(valkey_url) as g:
        said = await heard(g.url)
        assert f"the gateway at {g.url} is still open" in said and "ROPEWAY_REQUIRE_KEYS=true" in said
    async with serve(valkey_url, **NEVER) as g:
        assert "open" not in await heard(g.url)
    for nobody in (g.url, "http://", "127.0.0.1:1"):
        said = await heard(nobody)
        assert f"no gateway was found at {nobody}" in said and "ROPEWAY_REQUIRE_KEYS=true" in said


async def test_usage_by_day_and_key(valkey_url: str) -> None:
    async with serve(valkey_url, **NEVER) as g:
        key = await made(valkey_url, "create", "--tenant", "acme")
        assert "nothing was used" in (await command(valkey_url, "keys", "usage")).stdout
        await submit(g, key)
        await (await g.worker.pull()).answer("a", "b")
        (row,) = json.loads((await command(valkey_url, "keys", "usage", "--json", "--days", "2")).stdout)
        assert (row["tenant"], row["key"], row["requests"]) == ("acme", key.split("-")[1], 1)
        assert row["completion_tokens"] == 2
        assert "acme" in (await command(valkey_url, "keys", "usage", "--days", "2", "--key", row["key"])).stdout
        for nothing in (["--key", "x" * 12], ["--tenant", "other"], ["--day", "2020-01-01"]):
            assert "nothing was used" in (await command(valkey_url, "keys", "usage", *nothing)).stdout


async def test_what_a_tenant_may(valkey_url: str) -> None:
    async def shown(*arguments: str) -> dict[str, Any]:
        result = await command(valkey_url, "tenants", *arguments)
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout))

    default = {"requests": "default", "tokens": "default", "queued_jobs": "default", "queued_tokens": "default",
               "weight": 1.0, "models": None, "max_class": "high"}  # fmt: skip
    assert await shown("show", "acme") == {"name": "acme", **default}
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "none", "--queued-jobs", "5")
    terms = await shown(
        "set", "acme", *limits, "--weight", "2", "--model", "a", "--model", "b/*", "--max-class", "normal"
    )
    assert terms == {"name": "acme", **default, "requests": 60, "tokens": "none", "queued_jobs": 5, "weight": 2.0,
                     "models": ["a", "b/*"], "max_class": "normal"}  # fmt: skip
    changed = await shown("set", "acme", "--requests-per-minute", "default", "--all-models")
    assert changed == {**terms, "requests": "default", "models": None} == await shown("show", "acme")
    await made(valkey_url, "create", "--tenant", "with-a-key")
    both = json.loads((await command(valkey_url, "tenants", "list", "--json")).stdout)
    assert [one["name"] for one in both] == ["acme", "with-a-key"]
    assert "with-a-key" in (await command(valkey_url, "tenants", "list")).stdout
    assert "as the settings say" in (await command(valkey_url, "tenants", "reset", "acme")).stdout
    assert (await shown("show", "acme"))["weight"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["keys", "create", "--tenant", "../x"], 2, "tenant"),
        (["keys", "create", "--tenant", "{x}"], 2, "tenant"),
        (["keys", "create", "--tenant", "t", "--scope", "root"], 2, "inference, admin, metrics"),
        (["keys", "create", "--tenant", "t", "--expires", "soon"], 2, "90d"),
        (["keys", "create", "--tenant", "t", "--name", "a\nb"], 2, "name"),
        (["keys", "show", "nope"], 1, "no key has this id"),
        (["keys", "show", f"rw-{'x' * 12}-{'y' * 43}"], 1, "between the hyphens"),
        (["keys", "revoke", f"rw-{'x' * 12}-{'y' * 43}"], 1, "between the hyphens"),
        (["keys", "revoke", "x" * 12], 1, "no key has this id"),
        (["keys", "rotate", "x" * 12], 1, "no key has this id"),
        (["keys", "usage", "--day", "yesterday"], 2, "2026-01-31"),
        (["tenants", "set", "acme"], 2, "nothing is to be set"),
        (["tenants", "set", "a b", "--weight", "2"], 2, "tenant"),
        (["tenants", "set", "acme", "--weight", "0"], 2, "weight"),
        (["tenants", "set", "acme", "--queued-jobs", "0"], 2, "queued_jobs"),
        (["tenants", "set", "acme", "--queued-jobs", "many"], 2, "queued_jobs"),
        (["tenants", "set", "acme", "--model", "a", "--all-models"], 2, "exclude each other"),
    ],
)
async def test_mistakes_are_said_in_one_line(valkey_url: str, arguments: list[str], code: int, text: str) -> None:
    result = await command(valkey_url, *arguments)
    assert result.exit_code == code, result.output
    assert text in result.stderr and "y" * 43 not in result.stderr
    assert result.stderr.startswith("ropeway: ") and result.stderr.count("\n") == 1


async def test_two_that_rotate_at_once_make_one_key(valkey_url: str) -> None:
    async with access_to(valkey_url) as access:
        _, record = await access.create_key("acme", ["inference"])
        answers = await asyncio.gather(*(access.rotate_key(record.id, 60) for _ in range(5)), return_exceptions=True)
        assert sum(isinstance(answer, tuple) for answer in answers) == 1
        assert len(await access.all_keys()) == 2
