"""`callback_url` of jobs: what is refused, and how far its webhook is shown to be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.connect import connect
from shared.protocol import Envelope
from shared.webhook_calls import Patience
from shared.webhooks import Webhooks
from tests.integration.gateway_harness import Gateway, chat, serve
from tests.unit.gateway import support

URL = "https://hooks.test/order/7?token=hidden"
PATIENCE = Patience(60.0, 60.0)


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[Gateway]:
    async with serve(valkey_url, webhook_allow=["10.1.0.0/16", "hooks.test", "localhost"]) as gateway:
        yield gateway


@pytest.fixture
async def webhooks(gateway: Gateway) -> AsyncIterator[Webhooks]:
    client = connect(gateway.redis_url)
    yield Webhooks(client)
    await client.aclose()


def order(url: Any = URL, **more: Any) -> dict[str, Any]:
    return {"kind": "chat", "body": chat(), "callback_url": url, **more}


async def submitted(gateway: Gateway, url: Any = URL) -> dict[str, Any]:
    response = await gateway.http.post("/v1/jobs", json=order(url))
    assert response.status_code == 202, response.text
    body: dict[str, Any] = response.json()
    return body


async def shown(gateway: Gateway, job_id: str) -> dict[str, Any]:
    body: dict[str, Any] = (await gateway.http.get(f"/v1/jobs/{job_id}")).json()
    callback: dict[str, Any] = body["callback"]
    return callback


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://127.0.0.1/", "address_not_allowed"),
        ("https://169.254.169.254/latest/meta-data", "address_not_allowed"),
        ("https://[::1]/", "address_not_allowed"),
        ("https://[::ffff:10.0.0.1]/", "address_not_allowed"),
        ("https://2130706433/", "address_not_allowed"),
        ("https://ip6-localhost/", None),
        ("https://10.2.0.1/", "address_not_allowed"),
        ("http://hooks.test/", None),
        ("https://user:secret@hooks.test/", None),
        ("ftp://hooks.test/", None),
        ("nonsense", None),
        ("https://hooks.test/" + "x" * 2100, None),
        ("", None),
        (7, None),
        (["https://hooks.test/"], None),
    ],
)
async def test_what_is_refused(gateway: Gateway, url: Any, code: str | None) -> None:
    response = await gateway.http.post("/v1/jobs", json=order(url))
    if response.status_code == 202 and url == "https://ip6-localhost/":
        pytest.skip("this machine does not know the name")
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "callback_url"
    assert code is None or error["code"] == code
    assert "secret" not in error["message"]
    assert await gateway.worker.queued() == 0


async def test_of_many_the_first_at_fault_is_named(gateway: Gateway) -> None:
    jobs = [order(), order(None), order("https://127.0.0.1/"), order("https://127.0.0.1/")]
    response = await gateway.http.post("/v1/jobs", json={"jobs": jobs})
    assert response.status_code == 400 and response.json()["error"]["param"] == "jobs[2].callback_url"
    assert await gateway.worker.queued() == 0
    response = await gateway.http.post("/v1/jobs", json={"jobs": jobs[:2]})
    assert [job["callback"] and job["callback"]["state"] for job in response.json()["data"]] == ["waiting", None]


async def test_http_only_where_it_is_allowed(valkey_url: str) -> None:
    async with serve(valkey_url, webhook_http=True, webhook_allow=["127.0.0.0/8"]) as gateway:
        await submitted(gateway, "http://127.0.0.1:9/hook")
        response = await gateway.http.post("/v1/jobs", json=order("http://10.0.0.1/"))
        assert response.status_code == 400


async def test_it_is_shown_from_the_submit_to_the_delivery(gateway: Gateway, webhooks: Webhooks) -> None:
    job = await submitted(gateway)
    nothing = dict.fromkeys(("last_attempt_at", "last_status", "last_error", "next_attempt_at", "finished_at"))
    waiting = {"url": URL, "state": "waiting", "attempts": 0, **nothing}
    assert job["callback"] == waiting == await shown(gateway, job["id"])
    running = await gateway.worker.pull()
    assert running.job.envelope.callback_url == URL
    assert (await shown(gateway, job["id"]))["state"] == "waiting"
    await running.answer("hi")
    assert await shown(gateway, job["id"]) == waiting | {"state": "pending"}, "nobody has taken it over"
    [entry] = await webhooks.entries(support.MODEL, 0, 10)
    await webhooks.take(entry, {"url": URL, "body": b"{}"}, 7, PATIENCE)
    assert (await shown(gateway, job["id"]))["next_attempt_at"] is not None
    [claimed] = (await webhooks.claim(support.MODEL, 0, 1, 60.0, PATIENCE)).claimed
    await webhooks.done(claimed, "retry", PATIENCE, status=503, error="it answered 503", delay_s=0.0)
    failing = await shown(gateway, job["id"])
    assert (failing["state"], failing["attempts"], failing["last_status"]) == ("pending", 1, 503)
    assert failing["last_error"] == "it answered 503" and failing["last_attempt_at"]
    [claimed] = (await webhooks.claim(support.MODEL, 0, 1, 60.0, PATIENCE)).claimed
    await webhooks.done(claimed, "delivered", PATIENCE, status=200)
    done = await shown(gateway, job["id"])
    assert (done["state"], done["attempts"], done["last_error"], done["next_attempt_at"]) == (
        "delivered",
        2,
        None,
        None,
    )
    assert done["finished_at"]


async def test_lists_do_not_show_it(gateway: Gateway) -> None:
    await submitted(gateway)
    [entry] = (await gateway.http.get("/v1/jobs")).json()["data"]
    assert entry["callback"] is None


async def test_a_job_without_one(gateway: Gateway) -> None:
    job = await submitted(gateway, None)
    assert job["callback"] is None
    running = await gateway.worker.pull()
    envelope: Envelope = running.job.envelope
    assert envelope.callback_url is None
    await running.answer("hi")
    assert (await gateway.http.get(f"/v1/jobs/{job['id']}")).json()["callback"] is None


async def test_another_url_is_another_request_under_a_key(gateway: Gateway) -> None:
    headers = {"idempotency-key": "k"}
    first = await gateway.http.post("/v1/jobs", json=order(), headers=headers)
    again = await gateway.http.post("/v1/jobs", json=order(), headers=headers)
    assert again.json()["id"] == first.json()["id"] and again.json()["callback"]["url"] == URL
    other = await gateway.http.post("/v1/jobs", json=order(URL + "x"), headers=headers)
    assert other.status_code == 409
