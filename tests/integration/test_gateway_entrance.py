"""Idempotency keys and limits over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from shared import keys
from shared.errors import ServiceUnavailableError
from shared.keys import JobId
from tests.integration.gateway_harness import Gateway, chat, completion, events, running, serve
from tests.unit.gateway import support

KEY = {"Idempotency-Key": "order-7"}


def post(g: Gateway, body: dict[str, Any], headers: dict[str, str] = KEY, path: str = "chat/completions") -> Any:
    return asyncio.create_task(g.http.post(f"/v1/{path}", json=body, headers=headers))


async def test_a_repeat_attaches_to_the_live_job_and_to_its_result(redis_url: str) -> None:
    async with serve(redis_url) as g:
        first = post(g, chat())
        job = await g.worker.pull()
        second = post(g, chat())
        await asyncio.sleep(0.2)
        assert await g.worker.queued() == 0, "no second job"
        await job.answer("Hel", "lo")
        answers = [await first, await second, await post(g, chat())]
        assert [a.json()["choices"][0]["message"]["content"] for a in answers] == ["Hello"] * 3
        assert len({a.json()["id"] for a in answers}) == 1
        assert len({a.json()["created"] for a in answers}) == 1
        assert [a.headers.get("idempotent-replayed") for a in answers] == [None, "true", "true"]
        assert await g.worker.queued() == 0


async def test_a_repeated_stream_has_every_token_from_the_first_on(redis_url: str) -> None:
    async with serve(redis_url) as g:
        body = chat(stream=True)

        async def stream() -> str:
            async with g.http.stream("POST", "/v1/chat/completions", json=body, headers=KEY) as response:
                got = [e.data async for e in events(response)]
            assert got[-1] == "[DONE]"
            return "".join(c["delta"].get("content", "") for d in got[:-1] for c in d["choices"])

        first = asyncio.create_task(stream())
        job = await g.worker.pull()
        await job.start()
        await job.say("one ")
        second = asyncio.create_task(stream())
        await asyncio.sleep(0.2)
        await job.answer("two ", "three")
        assert [await first, await second, await stream()] == ["one two three"] * 3


async def test_a_client_that_comes_back_finds_its_job_going_on(redis_url: str) -> None:
    async with serve(redis_url) as g:
        first = post(g, chat())
        job = await g.worker.pull()
        first.cancel()
        await asyncio.sleep(0.5)
        assert not (await g.store.get(job.id)).cancel_requested
        again = post(g, chat())
        await asyncio.sleep(0.1)
        await job.answer("there")
        assert (await again).json()["choices"][0]["message"]["content"] == "there"


async def test_a_lost_answer_to_the_submit_does_not_end_the_job_that_the_repeat_finds(redis_url: str) -> None:
    async with serve(redis_url) as g:
        submit = g.services.store.submit

        async def loses_the_answer(*args: Any, **kwargs: Any) -> Any:
            g.services.store.submit = submit  # type: ignore[method-assign]
            await submit(*args, **kwargs)
            raise ServiceUnavailableError("the connection was lost")

        g.services.store.submit = loses_the_answer  # type: ignore[method-assign]
        assert (await post(g, chat())).status_code == 503
        again = post(g, chat())
        job = await g.worker.pull()
        await g.services.submitter.idle()
        await job.answer("there")
        assert (await again).json()["choices"][0]["message"]["content"] == "there"
        assert (await g.store.status(job.id))[0] == "completed"


async def test_of_many_at_once_there_is_one_job(redis_url: str) -> None:
    async with serve(redis_url) as g, running(redis_url) as (other, _), httpx.AsyncClient(base_url=other) as elsewhere:
        tasks = [post(g, completion()) for _ in range(5)]
        tasks = [post(g, chat(), path="chat/completions") for _ in range(5)]
        tasks += [
            asyncio.create_task(elsewhere.post("/v1/chat/completions", json=chat(), headers=KEY)) for _ in range(5)
        ]
        job = await g.worker.pull()
        await asyncio.sleep(0.3)
        assert await g.worker.queued() <= 1
        await job.answer("x")
        done, _ = await asyncio.wait(tasks, timeout=10)
        statuses = sorted(task.result().status_code for task in done)
        assert set(statuses) <= {200, 409}


@pytest.mark.parametrize("path", ["chat/completions", "jobs"])
async def test_another_body_under_the_same_key_is_a_conflict(redis_url: str, path: str) -> None:
    async with serve(redis_url) as g:

        def body(content: str) -> dict[str, Any]:
            inner = chat(content)
            return {"kind": "chat", "body": inner} if path == "jobs" else inner | {"background": True}

        first = post(g, body("hello"), path=path)
        job = await g.worker.pull()
        refused = await post(g, body("other"), path=path)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        assert refused.json()["error"]["param"] == "idempotency-key"
        assert await g.worker.queued() == 0
        await job.answer("x")
        assert (await first).status_code in (200, 202)


async def test_a_submitted_job_is_submitted_once(redis_url: str) -> None:
    async with serve(redis_url) as g:
        order = {"kind": "completion", "body": completion(), "metadata": {"n": "1"}}
        answers = [await post(g, order, path="jobs") for _ in range(3)]
        assert [a.status_code for a in answers] == [202] * 3
        assert len({a.json()["id"] for a in answers}) == 1
        assert await g.worker.queued() == 1
        # The order of fields is not part of what is asked.
        again = await post(g, dict(reversed(order.items())), path="jobs")
        assert again.json()["id"] == answers[0].json()["id"]


async def test_who_died_before_the_submit_is_finished_by_the_next(redis_url: str) -> None:
    async with serve(redis_url) as g:
        order = {"kind": "completion", "body": completion()}
        job_id = JobId.parse((await post(g, order, path="jobs")).json()["id"])
        await g.store.cancel(str(job_id))
        await g.services.store._ask("DEL", keys.job(job_id))  # as if it had never come to the submit
        again = await post(g, order, path="jobs")
        assert again.json()["id"] == str(job_id)
        assert again.headers.get("idempotent-replayed") is None
        assert (await g.worker.pull()).id == str(job_id)


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9", "a\tb"])
async def test_a_malformed_key_is_refused(redis_url: str, key: str) -> None:
    async with serve(redis_url) as g:
        response = await g.http.post(
            "/v1/chat/completions", json=chat(), headers=[(b"Idempotency-Key", key.encode("latin-1"))]
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "idempotency-key"
        assert await g.worker.queued() == 0


async def test_keys_of_tenants_are_their_own(redis_url: str) -> None:
    async with serve(redis_url, api_keys=["one", "two"]) as g:
        ids = []
        for token in ("one", "two", "one"):
            headers = KEY | {"Authorization": f"Bearer {token}"}
            ids.append((await post(g, {"kind": "chat", "body": chat()}, headers, "jobs")).json()["id"])
        assert ids[0] == ids[2] != ids[1]


async def test_requests_per_minute(redis_url: str) -> None:
    async with serve(redis_url, rate_limit_requests=3) as g:
        order = {"kind": "chat", "body": chat()}
        answers = [await post(g, order, {}, "jobs") for _ in range(4)]
        assert [a.status_code for a in answers] == [202] * 3 + [429]
        assert [a.headers["x-ratelimit-remaining-requests"] for a in answers[:3]] == ["2", "1", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
        error = answers[3].json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 1 <= int(answers[3].headers["retry-after"]) <= 20
        assert await g.worker.queued() == 3


async def test_tokens_per_minute_and_a_request_that_never_fits(redis_url: str) -> None:
    async with serve(redis_url, rate_limit_tokens=100) as g:
        fits = {"kind": "completion", "body": completion([1, 2, 3], max_tokens=50)}
        answers = [await post(g, fits, {}, "jobs") for _ in range(2)]
        assert [a.status_code for a in answers] == [202, 429]
        assert answers[0].headers["x-ratelimit-remaining-tokens"] == "47"
        never = await post(g, {"kind": "completion", "body": completion([1, 2, 3], max_tokens=200)}, {}, "jobs")
        assert never.status_code == 400
        assert "203 tokens" in never.json()["error"]["message"]
        assert await g.worker.queued() == 1


async def test_a_repeat_is_not_counted_again(redis_url: str) -> None:
    async with serve(redis_url, rate_limit_requests=1) as g:
        order = {"kind": "chat", "body": chat()}
        answers = [await post(g, order, path="jobs") for _ in range(3)]
        assert [a.status_code for a in answers] == [202] * 3
        assert (await post(g, order, {"Idempotency-Key": "other"}, "jobs")).status_code == 429


async def test_a_refused_first_try_is_counted_when_it_is_repeated(redis_url: str) -> None:
    async with serve(redis_url, rate_limit_requests=1) as g:
        order = {"kind": "chat", "body": chat()}
        assert (await post(g, order, {}, "jobs")).status_code == 202
        answers = [await post(g, order, path="jobs") for _ in range(2)]
        assert [a.status_code for a in answers] == [429] * 2, "a key is no way around the limit"
        assert await g.worker.queued() == 1


async def test_a_pool_over_all_lanes(redis_url: str) -> None:
    async with serve(redis_url, card=support.card(lanes=4), max_pool_queued_jobs=6) as g:
        order = {"kind": "chat", "body": chat()}
        for _ in range(6):
            assert (await post(g, order, {}, "jobs")).status_code == 202
        await g.services.submitter._loads.look(support.MODEL, 4)  # as it does each second
        refused = await post(g, order, {}, "jobs")
        assert refused.status_code == 429
        assert "6 jobs are queued, 6 may be" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]


async def test_retry_after_follows_the_drain_rate(redis_url: str) -> None:
    async with serve(redis_url, max_queued_jobs=4) as g:
        loads = g.services.submitter._loads
        state = loads._loads.setdefault(support.MODEL, loads.of(support.MODEL))
        order = {"kind": "completion", "body": completion([1], max_tokens=99)}
        for _ in range(4):
            assert (await post(g, order, {}, "jobs")).status_code == 202
        await loads.look(support.MODEL, 1)
        state.drain = 2.0  # tokens per second: 400 are queued
        refused = await post(g, order, {}, "jobs")
        assert refused.status_code == 429
        assert 15 <= int(refused.headers["retry-after"]) <= 21


async def test_what_a_tenant_may_have_queued_over_all_lanes(redis_url: str) -> None:
    settings: dict[str, Any] = {"max_tenant_queued_jobs": 3, "api_keys": ["one", "two"]}
    async with serve(redis_url, card=support.card(lanes=4), **settings) as g:
        order = {"kind": "completion", "body": completion([1, 2], max_tokens=8)}
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        answers = [await post(g, order, one, "jobs") for _ in range(4)]
        assert [a.status_code for a in answers] == [202] * 3 + [429]
        error = answers[3].json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "tenant_queue_full")
        assert "3 jobs of 3" in error["message"]
        assert int(answers[3].headers["retry-after"]) >= 1
        assert (await post(g, order, two, "jobs")).status_code == 202, "another key is another tenant"
        assert await g.worker.queued(4) == 4

        for _ in range(4):  # what runs is not queued
            await g.worker.pull(4)
        g.services.entrance._limiter._queues._looked_until.clear()  # as a second later
        again = await asyncio.gather(*(post(g, order, one, "jobs") for _ in range(5)))
        assert sorted(a.status_code for a in again) == [202] * 3 + [429] * 2, "they share one look"
        cancelled = next(a for a in again if a.status_code == 202).json()["id"]
        await g.http.post(f"/v1/jobs/{cancelled}/cancel", headers=one)
        g.services.entrance._limiter._queues._looked_until.clear()
        assert (await post(g, order, one, "jobs")).status_code == 202


async def test_tokens_that_a_tenant_may_have_queued(redis_url: str) -> None:
    async with serve(redis_url, max_tenant_queued_tokens=100, rate_limit_requests=3) as g:
        fits = {"kind": "completion", "body": completion([1, 2], max_tokens=48)}
        assert [(await post(g, fits, {}, "jobs")).status_code for _ in range(2)] == [202] * 2
        full = await post(g, {"kind": "completion", "body": completion([1], max_tokens=1)}, {}, "jobs")
        assert full.json()["error"]["code"] == "tenant_queue_full"
        never = await post(g, {"kind": "completion", "body": completion([1], max_tokens=100)}, {}, "jobs")
        assert never.status_code == 400, "no waiting helps"
        assert "101 tokens" in never.json()["error"]["message"]
        # What a rate limit refuses does not count as queued.
        for _ in range(2):
            await g.worker.pull()
        g.services.entrance._limiter._queues._looked_until.clear()
        answers = [await post(g, fits, {}, "jobs") for _ in range(3)]
        assert [(a.json().get("error") or {}).get("code") for a in answers] == [None, *["rate_limit_exceeded"] * 2]
        assert await g.worker.queued() == 1


async def test_a_repeat_does_not_count_as_queued_again(redis_url: str) -> None:
    async with serve(redis_url, max_tenant_queued_jobs=1) as g:
        order = {"kind": "chat", "body": chat()}
        answers = [await post(g, order, path="jobs") for _ in range(3)]
        assert [a.status_code for a in answers] == [202] * 3
        assert (await post(g, order, {}, "jobs")).status_code == 429
