"""A slice of the delivery of webhooks on a real Redis, with receivers in place of the network."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from standardwebhooks import Webhook

from shared import keys
from shared.address_guard import AddressGuard
from shared.connect import connect
from shared.job_index import JobIndex
from shared.jobs import Lease
from shared.keys import JobId
from shared.protocol import Card, TokenizerBundle
from shared.settings import TasksSettings
from shared.webhook_calls import Delivery, Patience
from shared.webhook_secrets import WebhookSecrets
from shared.webhook_signing import new_secret
from shared.webhooks import Webhooks
from tasks.webhook_message import Messages
from tasks.webhook_run import WebhookRun
from tasks.webhook_send import Headers, Sender, Sent
from tests.support.jobs import POOL, budget, envelope, last

SECRET = new_secret()


class FakeSender(Sender):
    """Asks a function in place of the network, and notes how many were under way at once, by host."""

    def __init__(self, answer: Callable[[str], Sent]) -> None:
        super().__init__(AddressGuard(), 1.0)
        self._answer, self.flying, self.most = answer, Counter[str](), Counter[str]()
        self.sent: list[tuple[str, dict[str, str], bytes]] = []

    async def send(self, url: str, headers: Headers, body: bytes) -> Sent:
        host = url.split("/")[2]
        self.flying[host] += 1
        self.most[host] = max(self.most[host], self.flying[host])
        await asyncio.sleep(0.02)
        self.flying[host] -= 1
        self.sent.append((url, {name.decode(): value.decode() for name, value in headers}, body))
        return self._answer(host)


class Office:
    """Everything that a run needs."""

    def __init__(self, client: Any) -> None:
        self.client, self.webhooks, self.stop = client, Webhooks(client), threading.Event()

    async def run(self, sender: Sender, **settings: Any) -> None:
        given = TasksSettings(webhook_secrets=[SECRET], webhook_first_retry_s=100.0, **settings)
        messages = Messages(JobIndex(self.client), given.webhook_max_bytes)
        run = WebhookRun(self.webhooks, messages, WebhookSecrets(self.client), sender, given, self.stop.is_set)
        async with asyncio.timeout(120):
            await run.run()

    async def ended(self, host: str, lane: int = 0, **fields: Any) -> str:
        """A job that has ended and owes a webhook."""
        job = envelope(lane=lane, callback_url=f"https://{host}/{lane}", **fields)
        await self.webhooks.submit(job)
        pulled = (await self.webhooks.pull(POOL, lane, "w", budget(), Lease())).jobs[0]
        await self.webhooks.publish([last(pulled, "w", 1)])
        return job.id

    async def states(self, ids: list[str]) -> Counter[str]:
        found: list[Delivery | None] = [await self.webhooks.delivery(job_id) for job_id in ids]
        return Counter("none" if delivery is None else delivery.state for delivery in found)


@pytest.fixture
async def office(valkey_url: str) -> AsyncIterator[Office]:
    client = connect(valkey_url)
    office = Office(client)
    card = Card(pool=POOL, digest="d", lanes=2, max_model_len=64, vocab_size=100, eos_token_ids=[1], kv_tokens=64)
    await office.webhooks.put_card(card, TokenizerBundle(tokenizer_json='{"added_tokens": []}'))
    yield office
    await client.aclose()


def fine(_: str) -> Sent:
    return Sent("delivered", 200)


async def test_all_lanes_are_served_and_all_is_signed(office: Office) -> None:
    ids = [await office.ended("fine.test", lane, metadata={"n": "1"}) for lane in (0, 1, 0)]
    sender = FakeSender(fine)
    await office.run(sender)
    assert await office.states(ids) == {"delivered": 3}
    told = {}
    for _, headers, body in sender.sent:
        event = Webhook(SECRET).verify(body, headers)
        told[event["data"]["id"]] = event
    assert set(told) == set(ids) and {event["type"] for event in told.values()} == {"job.completed"}
    assert await office.webhooks.counts() == {"delivered": 3, "try:delivered": 3}


async def test_a_tenant_s_own_secret_signs(office: Office) -> None:
    own = await WebhookSecrets(office.client).replace("t", new_secret(), 0.0)
    await office.ended("fine.test", tenant="t")
    await office.ended("fine.test", tenant="other")
    sender = FakeSender(fine)
    await office.run(sender)
    for _, headers, body in sender.sent:
        event = json.loads(body)
        secret = own.secret if (await office.webhooks.get(event["data"]["id"])).tenant == "t" else SECRET
        Webhook(secret).verify(body, headers)


async def test_a_host_that_is_silent_holds_up_no_other(office: Office) -> None:
    silent = [await office.ended("silent.test", lane % 2) for lane in range(60)]
    ids = [await office.ended("fine.test", lane % 2) for lane in range(10)]
    sender = FakeSender(lambda host: fine(host) if host == "fine.test" else Sent("timeout", error="no answer"))
    stopper = asyncio.create_task(stop_when(office, ids))
    await office.run(sender, webhook_connections=32)
    await stopper
    assert await office.states(ids) == {"delivered": 10}
    assert sender.most["silent.test"] <= 16
    tried = sum(url.startswith("https://silent.test") for url, _, _ in sender.sent)
    assert tried < 60, "most of them wait until somebody answers there"
    waiting = [await office.webhooks.delivery(job_id) for job_id in silent]
    assert sum(delivery.attempts for delivery in waiting if delivery is not None) == tried, "what was put off is no try"


async def stop_when(office: Office, ids: list[str]) -> None:
    """End the slice once some are delivered."""
    while await office.states(ids) != {"delivered": len(ids)}:
        await asyncio.sleep(0.02)
    office.stop.set()


async def test_a_body_that_is_too_large_goes_without_the_result(office: Office) -> None:
    small, large = await office.ended("fine.test"), envelope(callback_url="https://fine.test/")
    await office.webhooks.submit(large)
    pulled = (await office.webhooks.pull(POOL, 0, "w", budget(), Lease())).jobs[0]
    await office.webhooks.publish([last(pulled, "w", 1)])
    long_text = last(pulled, "w", 9000).ending
    assert long_text is not None
    await office.client.hset(keys.job(JobId.parse(large.id)), "result", long_text.result)
    sender = FakeSender(fine)
    await office.run(sender, webhook_max_bytes=4096)
    data = {event["data"]["id"]: event["data"] for event in (json.loads(body) for _, _, body in sender.sent)}
    assert data[large.id]["result"] is None and data[large.id]["status"] == "completed"
    assert data[small]["result"]["choices"]


async def test_what_is_lost_or_does_not_read_holds_nothing_up(office: Office) -> None:
    lost, strange, deleted, fine_one = [await office.ended("fine.test") for _ in range(4)]
    await office.client.delete(keys.job(JobId.parse(lost)))
    await office.client.hset(keys.job(JobId.parse(strange)), "env", b"\xc1")
    await office.webhooks.delete(deleted)
    outbox = keys.outbox(POOL, 0)
    await office.client.xadd(outbox, {"id": envelope().id, "status": "failed", "deleted": "1", "head": b"\xc1"})
    sender = FakeSender(fine)
    await office.run(sender)
    told = {json.loads(body)["data"]["id"]: json.loads(body) for _, _, body in sender.sent}
    assert set(told) == {strange, deleted, fine_one}
    assert told[strange]["data"]["result"] is None and told[strange]["type"] == "job.completed"
    assert await office.client.xlen(outbox) == 0
    assert (await office.webhooks.counts())["lost"] == 2


async def test_a_lane_whose_keys_are_broken_holds_up_no_other(office: Office) -> None:
    broken, ids = await office.ended("fine.test", 0), [await office.ended("fine.test", 1)]
    parsed = JobId.parse(broken)
    await office.client.set(keys.webhook(parsed), "x", ex=600)
    await office.run(FakeSender(fine))
    assert await office.states(ids) == {"delivered": 1}
    other = await office.ended("fine.test", 0)
    await office.client.set(keys.webhooks(POOL, 0, "owed"), "x", ex=600)
    ids = [await office.ended("fine.test", 1)]
    await office.run(FakeSender(fine))
    assert await office.states(ids) == {"delivered": 1} and await office.states([other]) == {"none": 1}


async def test_lanes_that_a_pool_has_no_longer(office: Office) -> None:
    job_id = await office.ended("fine.test", lane=7)
    await office.run(FakeSender(fine))
    assert await office.states([job_id]) == {"delivered": 1}


async def test_what_is_given_up_without_a_last_word_counts(office: Office) -> None:
    """Whoever was at its last try has died."""
    job_id = await office.ended("fine.test")
    [entry] = await office.webhooks.entries(POOL, 0, 10)
    await office.webhooks.take(entry, {"url": "https://fine.test/", "body": b"{}"}, 7, Patience(0.001, 60.0))
    await office.webhooks.claim(POOL, 0, 1, 0.0, Patience(0.001, 60.0))
    sender = FakeSender(fine)
    await office.run(sender)
    assert await office.states([job_id]) == {"failed": 1} and sender.sent == []
    assert await office.webhooks.counts() == {"failed": 1}


async def test_told_to_stop_it_begins_nothing(office: Office) -> None:
    job_id = await office.ended("fine.test")
    office.stop.set()
    await office.run(FakeSender(fine))
    assert await office.states([job_id]) == {"none": 1}


async def test_one_that_fails_within_ends_no_other(office: Office) -> None:
    ids = [await office.ended(host) for host in ("broken.test", "fine.test")]

    def answer(host: str) -> Sent:
        if host == "broken.test":
            raise RuntimeError("a defect")
        return fine(host)

    await office.run(FakeSender(answer))
    assert await office.states(ids) == {"pending": 1, "delivered": 1}
