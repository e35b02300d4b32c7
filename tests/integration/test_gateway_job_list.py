"""Listing jobs, many in one submit, delays, retention, deletion and the estimate of the wait, over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared import keys
from shared.keys import JobId
from tests.integration.gateway_harness import Gateway, chat, completion, events, running, serve
from tests.support.redis_topology import raw_client
from tests.unit.gateway import support

MODEL = support.MODEL


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with serve(redis_url) as g:
        yield g


async def submit(g: Gateway, headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    response = await g.http.post("/v1/jobs", json={"kind": "chat", "body": chat(), **more}, headers=headers)
    assert response.status_code == 202, response.text
    return response.json()  # type: ignore[no-any-return]


async def listed(g: Gateway, headers: dict[str, str] | None = None, **params: Any) -> dict[str, Any]:
    response = await g.http.get("/v1/jobs", params=params, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def ids(page: dict[str, Any]) -> list[str]:
    return [job["id"] for job in page["data"]]


async def test_a_list_is_paged_in_both_orders(gateway: Gateway) -> None:
    assert await listed(gateway) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False, "next": None,
    }  # fmt: skip
    submitted = []
    for _ in range(7):
        submitted.append((await submit(gateway))["id"])
        await asyncio.sleep(0.002)
    for order, expected in (("desc", submitted[::-1]), ("asc", submitted)):
        got, after, pages = [], {}, 0
        while True:
            page = await listed(gateway, limit=3, order=order, **after)
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            got, pages = got + ids(page), pages + 1
            if not page["has_more"]:
                assert page["next"] is None
                break
            after = {"after": page["next"] if pages % 2 else page["last_id"]}
        assert (got, pages) == (expected, 3)


async def test_a_list_shows_what_a_job_shows_but_for_its_result(gateway: Gateway) -> None:
    job = await submit(gateway, metadata={"a": "b"}, headers={"X-Request-Id": "mine"}, **{"class": "batch"})
    running_job = await gateway.worker.pull()
    await running_job.answer("hello")
    whole = (await gateway.http.get(f"/v1/jobs/{job['id']}")).json()
    shown = (await listed(gateway))["data"][0]
    without = {"usage", "timings", "result"}
    assert {k: v for k, v in whole.items() if k not in without} == {k: v for k, v in shown.items() if k not in without}
    assert all(shown[name] is None for name in without)


async def test_filters(gateway: Gateway) -> None:
    first = await submit(gateway)
    middle = time.time()
    await asyncio.sleep(0.01)
    second = await submit(gateway, **{"class": "high"})
    third = await submit(gateway, delay_s=600)
    await gateway.http.post(f"/v1/jobs/{first['id']}/cancel")
    for params, expected in (
        ({"status": "cancelled"}, [first]),
        ({"status": "queued,delayed"}, [third, second]),
        ({"status": "running"}, []),
        ({"class": "high"}, [second]),
        ({"class": "normal", "status": "delayed"}, [third]),
        ({"model": MODEL}, [third, second, first]),
        ({"model": "other"}, []),
        ({"pool": MODEL}, [third, second, first]),
        ({"created_after": middle}, [third, second]),
        ({"created_before": middle}, [first]),
        ({"created_before": middle, "created_after": middle}, []),
        ({"created_before": 1e308}, [third, second, first]),
        ({"created_after": 1e308}, []),
        ({"status": "queued", "limit": 1}, [second]),
    ):
        assert ids(await listed(gateway, **params)) == [job["id"] for job in expected], params


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"after": "x"}, "after"),
        ({"after": "\x00"}, "after"),
        ({"order": "random"}, "order"),
        ({"status": "queued,sleeping"}, "status"),
        ({"class": "first"}, "class"),
        ({"created_after": "NaN"}, "created_after"),
        ({"created_before": "-1"}, "created_before"),
    ],
)
async def test_bad_queries_are_named(gateway: Gateway, params: dict[str, Any], param: str) -> None:
    response = await gateway.http.get("/v1/jobs", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_unknown_pool_is_a_404(gateway: Gateway) -> None:
    assert (await gateway.http.get("/v1/jobs?pool=other")).json()["error"]["code"] == "model_not_found"


async def test_nobody_sees_or_touches_the_jobs_of_another_key(redis_url: str) -> None:
    keyring = {"api_keys": ["key-of-a", "key-of-b"]}
    a, b = ({"Authorization": f"Bearer key-of-{who}"} for who in "ab")
    async with serve(redis_url, **keyring) as g:
        mine = (await submit(g, headers=a))["id"]
        assert ids(await listed(g, headers=a)) == [mine]
        assert ids(await listed(g, headers=b)) == []
        for method, path in (("DELETE", ""), ("POST", "/token"), ("POST", "/cancel"), ("GET", ""), ("GET", "/events")):
            response = await g.http.request(method, f"/v1/jobs/{mine}{path}", headers=b)
            assert response.status_code == 404, path
        assert (await g.http.get("/v1/jobs")).status_code == 401
        assert (await g.http.delete(f"/v1/jobs/{mine}", headers=a)).status_code == 200


async def test_a_page_costs_a_bounded_number_of_looks(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.job_list._READ", 4)
    monkeypatch.setattr("gateway.job_list.MAX_LOOKED_AT", 8)
    wanted = await submit(gateway, **{"class": "high"})
    for _ in range(12):
        await submit(gateway)
    page = await listed(gateway, **{"class": "high"})
    assert (page["data"], page["has_more"]) == ([], True)
    assert ids(await listed(gateway, after=page["next"], **{"class": "high"})) == [wanted["id"]]


# Many jobs in one submit


async def test_many_jobs_are_queued_in_one_call(gateway: Gateway) -> None:
    orders = [
        {"kind": "chat", "body": chat(), "metadata": {"n": "0"}},
        {"kind": "completion", "body": completion(), "class": "high", "deadline_s": 60},
        {"kind": "completion", "body": completion(), "delay_s": 3600},
    ]
    response = await gateway.http.post("/v1/jobs", json={"jobs": orders})
    assert response.status_code == 202
    page = response.json()
    assert page["object"] == "list" and [j["kind"] for j in page["data"]] == ["chat", "completion", "completion"]
    assert [j["status"] for j in page["data"]] == ["queued", "queued", "delayed"]
    assert response.headers["x-ropeway-job-id"] == page["first_id"] == page["data"][0]["id"]
    assert page["data"][1]["deadline_at"] - page["data"][1]["created_at"] in (60, 61)
    assert {j["id"] for j in page["data"]} == set(ids(await listed(gateway)))
    assert await gateway.worker.queued() == 2


@pytest.mark.parametrize(
    ("jobs", "param"),
    [
        ([], "jobs"),
        ([{"kind": "chat", "body": chat()}] * 5, "jobs"),
        ([{"kind": "chat", "body": chat()}, {"body": chat()}], "jobs[1].kind"),
        (
            [{"kind": "chat", "body": chat()}, {"kind": "chat", "body": chat(temperature=-1)}],
            "jobs[1].body.temperature",
        ),
        ([{"kind": "chat", "body": chat()}, {"kind": "chat", "body": chat(model="x")}], "jobs[1].body.model"),
        ([{"kind": "chat", "body": chat(), "retention_s": 1e9}], "jobs[0].retention_s"),
        (["x"], "jobs[0]"),
        ("x", "jobs"),
    ],
)
async def test_one_bad_job_refuses_all(redis_url: str, jobs: Any, param: str) -> None:
    async with serve(redis_url, max_jobs_per_request=4) as g:
        response = await g.http.post("/v1/jobs", json={"jobs": jobs})
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param
        assert ids(await listed(g)) == []


async def test_many_jobs_count_as_many_requests(redis_url: str) -> None:
    async with serve(redis_url, rate_limit_requests=3) as g:
        order = {"kind": "chat", "body": chat()}
        response = await g.http.post("/v1/jobs", json={"jobs": [order] * 4})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "rate_limit_exceeded")
        assert (await g.http.post("/v1/jobs", json={"jobs": [order] * 3})).status_code == 202
        assert (await g.http.post("/v1/jobs", json=order)).status_code == 429


async def test_a_full_lane_takes_none_of_many(redis_url: str) -> None:
    async with serve(redis_url, max_queued_jobs=2) as g:
        response = await g.http.post("/v1/jobs", json={"jobs": [{"kind": "chat", "body": chat()}] * 3})
        assert response.status_code == 429
        await g.services.submitter.idle()
        assert await g.worker.queued() == 0


async def test_many_jobs_under_one_key_are_queued_once(gateway: Gateway) -> None:
    body = {"jobs": [{"kind": "chat", "body": chat()}] * 3}
    headers = {"Idempotency-Key": "k"}
    first = await gateway.http.post("/v1/jobs", json=body, headers=headers)
    job = await gateway.worker.pull()
    again = await gateway.http.post("/v1/jobs", json=body, headers=headers)
    assert ids(first.json()) == ids(again.json())
    assert again.headers["idempotent-replayed"] == "true"
    assert {j["status"] for j in again.json()["data"] if j["id"] == job.id} == {"running"}
    assert len(ids(await listed(gateway))) == 3


# Delay, retention, estimate


async def test_a_job_starts_after_its_delay_though_its_gateway_is_gone(redis_url: str) -> None:
    async with serve(redis_url) as g:
        async with running(redis_url) as (url, _), httpx.AsyncClient(base_url=url) as http:
            order = {"kind": "chat", "body": chat(), "delay_s": 0.3, "deadline_s": 60}
            job = (await http.post("/v1/jobs", json=order)).json()
        assert job["status"] == "delayed"
        assert job["not_before"] - job["created_at"] in (0, 1)
        assert job["deadline_at"] - job["created_at"] in (60, 61)
        assert (await g.http.get(f"/v1/jobs/{job['id']}")).json()["status"] == "delayed"
        taken = await g.worker.pull()  # nobody but it looks at the queue
        assert taken.id == job["id"]
        await taken.answer("there")
        view = (await g.http.get(f"/v1/jobs/{job['id']}")).json()
        assert view["status"] == "completed"
        assert view["started_at"] >= view["not_before"]


async def test_the_sweep_starts_it_where_no_worker_lives(redis_url: str) -> None:
    async with serve(redis_url, sweep_s=0.05) as g:
        job = await submit(g, delay_s=0.05)
        assert await g.until(job["id"], "queued") == "queued"


async def test_followers_of_a_delayed_job_see_it_from_its_first_event(gateway: Gateway) -> None:
    job = await submit(gateway, not_before=time.time() + 0.2)
    assert job["status"] == "delayed"

    async def follow() -> list[str]:
        async with gateway.http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
            return [event.data["kind"] async for event in events(response)]

    reader = asyncio.create_task(follow())
    await (await gateway.worker.pull()).answer("x")
    assert await reader == ["started", "tokens", "done"]


async def test_a_delayed_job_is_cancelled(gateway: Gateway) -> None:
    job = await submit(gateway, delay_s=600)
    view = (await gateway.http.post(f"/v1/jobs/{job['id']}/cancel")).json()
    assert (view["status"], view["result"]["choices"][0]["finish_reason"]) == ("cancelled", "abort")
    load = await gateway.store.lane_load(MODEL, 0)
    assert (load.delayed_jobs, load.queued_jobs) == (0, 0)


async def test_a_time_that_has_passed_is_now(gateway: Gateway) -> None:
    for more in ({"not_before": time.time() - 5}, {"delay_s": 0}, {"not_before": 0}):
        job = await submit(gateway, **more)
        assert (job["status"], job["not_before"]) == ("queued", None)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"delay_s": -1}, "delay_s"),
        ({"delay_s": 1e9}, "delay_s"),
        ({"delay_s": "5"}, "delay_s"),
        ({"not_before": 1e12}, "not_before"),
        ({"not_before": 5, "delay_s": 5}, "not_before"),
        ({"retention_s": 0}, "retention_s"),
        ({"retention_s": 1e9}, "retention_s"),
        ({"callback_url": "https://user@example.test/"}, "callback_url"),
    ],
)
async def test_bad_times_are_named(gateway: Gateway, more: dict[str, Any], param: str) -> None:
    response = await gateway.http.post("/v1/jobs", json={"kind": "chat", "body": chat(), **more})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert ids(await listed(gateway)) == []


async def test_retention_is_the_jobs_own(gateway: Gateway) -> None:
    job_id = (await submit(gateway, retention_s=7000))["id"]
    await (await gateway.worker.pull()).answer("x")
    client = await raw_client(gateway.redis_url)
    assert 6_900_000 < await client.pttl(keys.job(JobId.parse(job_id))) <= 7_000_000
    await client.aclose()


async def test_the_wait_is_estimated_from_what_is_queued_and_how_fast_it_drains(gateway: Gateway) -> None:
    assert (await submit(gateway))["estimated_wait_s"] is None, "no worker lives"
    await gateway.worker.join()
    await gateway.services.catalogue.refresh()
    await gateway.services.loads.look(MODEL, 1)
    state = gateway.services.loads.of(MODEL)
    state.drain = 10.0
    tokens = state.load.queued_tokens
    assert tokens > 0
    job = await submit(gateway)
    assert job["estimated_wait_s"] == round(tokens / 10, 1)
    assert (await submit(gateway, delay_s=1000))["estimated_wait_s"] == 1000.0
    assert (await submit(gateway, **{"class": "high"}))["estimated_wait_s"] == 0.0
    assert (await gateway.http.get(f"/v1/jobs/{job['id']}")).json()["estimated_wait_s"] is not None
    state.paused = True
    assert (await submit(gateway))["estimated_wait_s"] is None


# Deleting


async def test_a_deleted_job_does_not_exist(gateway: Gateway) -> None:
    job_id = (await submit(gateway))["id"]
    running_job = await gateway.worker.pull()
    response = await gateway.http.delete(f"/v1/jobs/{job_id}")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "job_running")
    await running_job.answer("x")
    response = await gateway.http.delete(f"/v1/jobs/{job_id}")
    assert response.json() == {"id": job_id, "object": "job", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", ""), ("POST", "/token")):
        assert (await gateway.http.request(method, f"/v1/jobs/{job_id}{path}")).status_code == 404, path
    assert ids(await listed(gateway)) == []
    client = await raw_client(gateway.redis_url)
    assert not await client.keys(f"*{job_id}*")
    await client.aclose()


async def test_every_answer_names_its_job(gateway: Gateway) -> None:
    job_id = (await submit(gateway))["id"]
    running = await gateway.worker.pull()

    async def status(method: str, path: str) -> int:
        response = await gateway.http.request(method, f"/v1/jobs/{job_id}{path}")
        assert response.headers.get_list("x-ropeway-job-id") == [job_id], (method, path)
        return response.status_code

    assert await status("DELETE", "") == 409
    assert await status("GET", "/events?after=x") == await status("GET", "/events?after=99") == 400
    await running.answer("x")
    assert await status("GET", "/events?after=3") == 204
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/token"), ("POST", "/cancel"), ("DELETE", "")):
        assert await status(method, path) == 200, path
    assert await status("GET", "") == 404
    assert "x-ropeway-job-id" not in (await gateway.http.get("/v1/jobs/no%0d%0aid")).headers
