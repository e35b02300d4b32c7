"""`ropeway webhooks` against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner, Result

from ropeway import cli
from shared.connect import connect
from shared.jobstore import JobStore
from shared.protocol import Card, TokenizerBundle
from shared.webhook_calls import Patience
from shared.webhook_secrets import WebhookSecrets
from shared.webhook_signing import check_secret, new_secret
from shared.webhooks import Webhooks
from tests.support.jobs import POOL, envelope

URL = "https://hooks.test/a?token=hidden"
PATIENCE = Patience(60.0, 60.0)


@pytest.fixture
async def webhooks(valkey_url: str) -> AsyncIterator[Webhooks]:
    """A store with a pool of two lanes."""
    commands = connect(valkey_url)
    webhooks = Webhooks(commands)
    card = Card(pool=POOL, digest="d", lanes=2, max_model_len=64, vocab_size=100, eos_token_ids=[1], kv_tokens=64)
    await webhooks.put_card(card, TokenizerBundle(tokenizer_json="{}"))
    yield webhooks
    await commands.aclose()


async def command(url: str, *arguments: str, env: dict[str, str] | None = None) -> Result:
    def call() -> Result:
        more = {"COLUMNS": "250", "NO_COLOR": "1", **(env or {})}
        return CliRunner().invoke(cli.app, ["webhooks", *arguments, "--redis", url], env=more)

    return await asyncio.to_thread(call)


async def ended(webhooks: JobStore, lane: int = 0) -> str:
    """A job that was cancelled and owes a webhook."""
    job = envelope(lane=lane, callback_url=URL)
    await webhooks.submit(job)
    await webhooks.cancel(job.id)
    return job.id


async def due(webhooks: Webhooks, lane: int = 0) -> str:
    """A job whose webhook was tried once, in vain."""
    job_id = await ended(webhooks, lane)
    [entry] = await webhooks.entries(POOL, lane, 10)
    await webhooks.take(entry, {"url": URL, "body": b"{}", "type": "job.cancelled"}, entry_ms(entry.entry), PATIENCE)
    [claimed] = (await webhooks.claim(POOL, lane, 1, 60.0, PATIENCE)).claimed
    await webhooks.done(claimed, "retry", PATIENCE, status=503, error="it answered 503", delay_s=30.0)
    return job_id


def entry_ms(entry: bytes) -> int:
    return int(entry.partition(b"-")[0])


async def given_up(webhooks: Webhooks, lane: int = 0) -> str:
    job_id = await ended(webhooks, lane)
    [entry] = await webhooks.entries(POOL, lane, 10)
    await webhooks.take(entry, {"url": URL, "body": b"{}"}, entry_ms(entry.entry), PATIENCE)
    [claimed] = (await webhooks.claim(POOL, lane, 1, 60.0, PATIENCE)).claimed
    await webhooks.done(claimed, "gone", PATIENCE, status=410, error="it answered 410: it wants no more")
    return job_id


async def test_list_and_show(webhooks: Webhooks, valkey_url: str) -> None:
    assert "no webhooks are owed" in (await command(valkey_url, "list")).output
    late, gone = await due(webhooks, 1), await given_up(webhooks)
    table = (await command(valkey_url, "list")).output
    assert late in table and gone in table and "503" in table and "hooks.test" in table and "hidden" not in table
    rows = json.loads((await command(valkey_url, "list", "--failed", "--json")).output)
    assert [(row["job_id"], row["state"]) for row in rows] == [(gone, "gone")]
    assert json.loads((await command(valkey_url, "list", "--pool", "other", "--json")).output) == []
    shown = json.loads((await command(valkey_url, "show", late)).output)
    assert (shown["state"], shown["attempts"], shown["last_status"], shown["url"]) == ("pending", 1, 503, URL)
    assert shown["next_attempt"] > shown["last_attempt"] and shown["ended"] is None


async def test_show_before_anything_was_sent(webhooks: Webhooks, valkey_url: str) -> None:
    waiting = envelope(callback_url=URL)
    await webhooks.submit(waiting)
    assert json.loads((await command(valkey_url, "show", waiting.id)).output)["state"] == "waiting"
    await webhooks.cancel(waiting.id)
    assert json.loads((await command(valkey_url, "show", waiting.id)).output)["state"] == "pending"
    without = envelope()
    await webhooks.submit(without)
    for job_id, why in ((without.id, "no callback_url"), (envelope().id, "no job has this id"), ("x", "no job has")):
        answer = await command(valkey_url, "show", job_id)
        assert answer.exit_code == 1 and why in answer.output


async def test_redeliver(webhooks: Webhooks, valkey_url: str) -> None:
    gone = await given_up(webhooks)
    assert (await command(valkey_url, "redeliver", gone)).exit_code == 0
    assert [claimed.job_id for claimed in (await webhooks.claim(POOL, 0, 9, 60.0, PATIENCE)).claimed] == [gone]
    waiting = envelope(callback_url=URL)
    await webhooks.submit(waiting)
    answer = await command(valkey_url, "redeliver", waiting.id)
    assert answer.exit_code == 1 and "has not ended" in answer.output


async def test_secrets(webhooks: Webhooks, valkey_url: str) -> None:
    client = connect(valkey_url)
    secrets, setting = WebhookSecrets(client), new_secret()

    async def printed(*arguments: str) -> list[str]:
        answer = await command(valkey_url, "secret", *arguments)
        assert answer.exit_code == 0, answer.output
        return [check_secret(line) for line in answer.stdout.splitlines()]

    [default] = await printed()
    assert await secrets.signing("t", []) == [default] == await printed()
    assert await secrets.signing("t", [setting]) == [setting]
    [own] = await printed("--tenant", "t")
    assert own != default and await secrets.signing("t", [setting]) == [own]
    assert await secrets.signing("other", []) == [default]
    new, old = await printed("--tenant", "t", "--rotate")
    assert old == own and await secrets.signing("t", []) == [new, own]
    [newest] = await printed("--tenant", "t", "--rotate", "--grace", "0")
    assert await secrets.signing("t", []) == [newest] and newest != new
    assert await secrets.tenants() == ["t"]
    assert await printed("--tenant", "t", "--remove") == [] and await secrets.signing("t", []) == [default]
    assert (await command(valkey_url, "secret", "--remove")).exit_code == 2
    answer = await command(valkey_url, "secret", "--tenant", "../x\ny")
    assert answer.exit_code == 2 and "tenant: must begin" in answer.stderr and await secrets.tenants() == []
    answer = await command(valkey_url, "secret", env={"ROPEWAY_WEBHOOK_SECRETS": json.dumps([setting])})
    assert answer.exit_code == 1 and setting not in answer.output
    await client.aclose()
