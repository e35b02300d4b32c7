"""What a page in a browser needs: tokens for one job's events, and CORS where a setting allows it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from gateway import stream_tokens
from tests.integration.gateway_harness import Gateway, chat, running, serve
from tests.support.logged import logged
from tests.support.redis_topology import raw_client

KEYS: dict[str, Any] = {"api_keys": ["the-key"]}
AUTH = {"Authorization": "Bearer the-key"}
ORIGIN = "https://app.example.test"


async def submit(g: Gateway) -> str:
    response = await g.http.post("/v1/jobs", json={"kind": "chat", "body": chat()}, headers=AUTH)
    return str(response.json()["id"])


async def token(g: Gateway, job_id: str, **body: Any) -> dict[str, Any]:
    response = await g.http.post(f"/v1/jobs/{job_id}/token", json=body, headers=AUTH)
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    return response.json()  # type: ignore[no-any-return]


async def test_a_token_reads_the_events_of_its_job_and_nothing_else(redis_url: str) -> None:
    async with serve(redis_url, **KEYS) as g:
        job_id, other = await submit(g), await submit(g)
        made = await token(g, job_id)
        assert 295 <= made["expires_at"] - time.time() <= 300
        for _ in range(2):
            await (await g.worker.pull()).answer("x")
        response = await g.http.get(made["url"])
        assert response.status_code == 200 and '"text":"x"' in response.text
        assert response.headers["x-ropeway-job-id"] == job_id
        # As a browser's EventSource comes back.
        assert (await g.http.get(made["url"], headers={"Last-Event-ID": "3"})).status_code == 204
        text = made["token"]
        for method, path in (
            ("GET", f"/v1/jobs/{other}/events?token={text}"),
            ("GET", f"/v1/jobs/{job_id}?token={text}"),
            ("POST", f"/v1/jobs/{job_id}/cancel?token={text}"),
            ("DELETE", f"/v1/jobs/{job_id}?token={text}"),
            ("GET", f"/v1/jobs?token={text}"),
            ("POST", f"/v1/jobs/{job_id}/events?token={text}"),
            ("GET", f"/v1/jobs/{job_id}/events?token="),
            ("GET", f"/v1/jobs/{job_id}/events?nottoken={text}"),
        ):
            assert (await g.http.request(method, path)).status_code == 401, path
        # A wrong key is a wrong key, whatever comes with it.
        wrong = {"Authorization": "Bearer other"}
        assert (await g.http.get(made["url"], headers=wrong)).status_code == 401


@pytest.mark.parametrize("what", ["expiry", "signature", "cut", "long", "nonsense", "empty signature", "not ascii"])
async def test_a_forged_token_is_refused(redis_url: str, what: str) -> None:
    async with serve(redis_url, **KEYS) as g:
        job_id = await submit(g)
        expiry, _, signature = (await token(g, job_id))["token"].partition(".")
        forged = {
            "expiry": f"{int(expiry) + 1}.{signature}",
            "signature": f"{expiry}.{signature[::-1]}",
            "cut": f"{expiry}.{signature[:-1]}",
            "long": f"{expiry}.{signature}{'A' * 100}",
            "nonsense": "x",
            "empty signature": f"{expiry}.",
            "not ascii": f"{expiry}.{signature[:-1]}\u00e9",
        }[what]
        response = await g.http.get(f"/v1/jobs/{job_id}/events", params={"token": forged})
        assert response.status_code == 401
        assert response.json()["error"]["param"] == "token"
        assert forged not in response.text


async def test_a_token_expires(redis_url: str) -> None:
    async with serve(redis_url, max_token_s=10, **KEYS) as g:
        job_id = await submit(g)
        made = await token(g, job_id, expires_in_s=2)
        assert made["expires_at"] - time.time() <= 2
        g.services.tokens._clock = lambda: time.time() + 3
        response = await g.http.get(made["url"])
        assert (response.status_code, response.json()["error"]["message"]) == (401, "token: it has expired")
        assert made["expires_at"] < time.time() + 10
        for bad in (0, -1, 11, "5", True):
            response = await g.http.post(f"/v1/jobs/{job_id}/token", json={"expires_in_s": bad}, headers=AUTH)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "expires_in_s"), bad
        assert (await g.http.post(f"/v1/jobs/{job_id}/token", headers=AUTH)).status_code == 200


async def test_gateways_know_each_others_tokens_by_a_setting_or_by_redis(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_tokens, "_RELOAD_S", 0.0)
    for settings in (KEYS, {**KEYS, "token_secret": "a secret of these gateways"}):
        async with serve(redis_url, **settings) as g, running(redis_url, **settings) as (url, _):
            job_id = await submit(g)
            made = await token(g, job_id)
            await (await g.worker.pull()).answer("x")
            async with httpx.AsyncClient(base_url=url) as elsewhere:
                assert (await elsewhere.get(made["url"])).status_code == 200
                # Redis comes back empty: the other gateway makes another secret, and this one learns of it.
                client = await raw_client(redis_url)
                await client.delete("rw:token_secret")
                await client.aclose()
                g.services.tokens._held = None
                made = await token(g, job_id)
                assert (await elsewhere.get(made["url"])).status_code == 200


async def test_tokens_are_in_no_log(redis_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    with logged("debug"):
        async with serve(redis_url, **KEYS) as g:
            job_id = await submit(g)
            made = await token(g, job_id)
            job = await g.worker.pull()
            reader = asyncio.create_task(g.http.get(made["url"]))
            await job.answer("x")
            assert (await reader).status_code == 200
            await g.http.get(made["url"].replace(job_id, job_id[:-1]))
    output = capfd.readouterr()
    assert made["token"] not in output.out + output.err
    assert "http.request" in output.out + output.err


async def test_without_a_setting_no_page_of_another_origin_may_read(redis_url: str) -> None:
    async with serve(redis_url) as g:
        response = await g.http.get("/v1/models", headers={"Origin": ORIGIN})
        assert "access-control-allow-origin" not in response.headers
        preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        response = await g.http.options("/v1/jobs", headers=preflight)
        assert "access-control-allow-origin" not in response.headers


async def test_pages_of_these_origins_may(redis_url: str) -> None:
    async with serve(redis_url, cors_origins=[ORIGIN], **KEYS) as g:
        preflight = {
            "Origin": ORIGIN,
            "Access-Control-Request-Method": "DELETE",
            "Access-Control-Request-Headers": "authorization,last-event-id,x-stainless-os",
        }
        response = await g.http.options("/v1/jobs/x", headers=preflight)  # without a key: browsers send none
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-stainless-os" in response.headers["access-control-allow-headers"]
        job_id = await submit(g)
        made = await token(g, job_id)
        await (await g.worker.pull()).answer("x")
        response = await g.http.get(made["url"], headers={"Origin": ORIGIN})
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-ropeway-job-id" in response.headers["access-control-expose-headers"].lower()
        assert "access-control-allow-credentials" not in response.headers
        refused = await g.http.get("/v1/models", headers={"Origin": ORIGIN})  # errors can be read too
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        other = await g.http.get("/v1/models", headers={"Origin": "https://evil.example.test", **AUTH})
        assert "access-control-allow-origin" not in other.headers


async def test_any_origin(redis_url: str) -> None:
    async with serve(redis_url, cors_origins=["*"]) as g:
        assert (await g.http.get("/health", headers={"Origin": ORIGIN})).headers["access-control-allow-origin"] == "*"
