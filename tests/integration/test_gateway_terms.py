"""What tenants may, beyond the settings: limits, weight, models and classes; and what they have used."""

from __future__ import annotations

import re
from typing import Any

from tests.integration.gateway_harness import Gateway, chat, completion, serve
from tests.support.keys import NEVER, access_to, bearer, grant, make, submit, until
from tests.unit.gateway import support

MODEL = support.MODEL


async def test_a_tenants_limit_is_one_for_all_of_its_keys(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, rate_limit_requests=2, **NEVER) as g:
        one, two, other = [(await make(access, name))[0] for name in ("acme", "acme", "other")]
        await grant(access, "acme", requests=3, tokens=1000)
        answers = [await submit(g, key) for key in (one, two, one, two)]
        assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
        assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["2", "1", "0", "0"]
        refused = answers[3]
        assert (
            refused.headers["x-ratelimit-limit-requests"] == "3"
            and refused.headers["x-ratelimit-limit-tokens"] == "1000"
        )
        assert int(refused.headers["retry-after"]) >= 1
        assert re.fullmatch(r"\d+\.\ds", refused.headers["x-ratelimit-reset-requests"])
        assert [(await submit(g, other)).status_code for _ in range(3)] == [202, 202, 429]
        await grant(access, "other", requests=-1)
        await until(lambda: _accepted(g, other))
        assert "x-ratelimit-limit-requests" not in (await submit(g, other)).headers
        assert await access.forget_terms("other") and not await access.forget_terms("other")
        await until(lambda: _limited(g, other))


async def _accepted(g: Gateway, key: str) -> bool:
    return (await submit(g, key)).status_code == 202


async def _limited(g: Gateway, key: str) -> bool:
    return (await submit(g, key)).status_code == 429


async def test_what_may_be_queued_and_how_much_it_weighs(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, require_keys=True) as g:
        key, _ = await make(access)
        await grant(access, "acme", queued_jobs=2, weight=2.5)
        answers = [await submit(g, key) for _ in range(3)]
        assert [a.status_code for a in answers] == [202, 202, 429]
        assert answers[2].json()["error"]["code"] == "tenant_queue_full"
        assert (await g.worker.pull()).job.envelope.weight == 2.5


async def test_models_that_a_tenant_may_not_use_are_neither_shown_nor_told_from_none(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, **NEVER) as g:
        key, _ = await make(access)

        async def codes(model: str) -> set[tuple[int, str]]:
            answers = [
                await g.http.post(path, json=body, headers=bearer(key))
                for path, body in (
                    ("/v1/chat/completions", chat(model=model, background=True)),
                    ("/v1/completions", completion(model=model)),
                    ("/v1/responses", {"model": model, "input": "x"}),
                    ("/v1/jobs", {"kind": "chat", "body": chat(model=model)}),
                    ("/v1/jobs", {"kind": "chat", "adapter": model, "body": chat()}),
                    ("/tokenize", {"model": model, "prompt": "x"}),
                )
            ]
            answers.append(await g.http.get(f"/v1/models/{model}", headers=bearer(key)))
            answers.append(await g.http.get(f"/v1/adapters/{model}", headers=bearer(key)))
            return {(a.status_code, a.json()["error"]["code"]) for a in answers}

        await grant(access, "acme", models=["mine/*"])
        assert await codes(MODEL) == await codes("no-such") == {(403, "model_not_allowed")}
        assert await codes("mine/none") == {(404, "model_not_found")}
        assert (await g.http.get("/v1/models", headers=bearer(key))).json()["data"] == []
        await grant(access, "acme", models=[MODEL])
        await until(lambda: _accepted(g, key))
        assert [m["id"] for m in (await g.http.get("/v1/models", headers=bearer(key))).json()["data"]] == [MODEL]


async def test_the_highest_class_of_a_tenant(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, require_keys=True) as g:
        key, _ = await make(access)
        await grant(access, "acme", max_class="batch")
        assert (await submit(g, key)).json()["class"] == "batch", "who asks for nothing gets the highest that there is"
        for order, param in (
            ({"class": "high"}, "class"),
            ({"body": completion(priority=-1)}, "body.priority"),
            ({"body": completion(service_tier="priority")}, "body.service_tier"),
        ):
            answer = await submit(g, key, **order)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (403, "class_not_allowed", param)


async def test_usage_is_shown_to_its_tenant_and_to_administrators(valkey_url: str) -> None:
    async with access_to(valkey_url) as access, serve(valkey_url, require_keys=True) as g:
        made = [await make(access, name) for name in ("acme", "acme", "other")]
        made.append(await make(access, "ops", "admin"))
        one, two, other, admin = [secret for secret, _ in made]
        for key in (one, one, two, other):
            await submit(g, key)
            await (await g.worker.pull()).answer("a", "b", "c")

        async def usage(caller: str, **query: str) -> list[dict[str, Any]]:
            answer = await g.http.get("/v1/usage", params=query, headers=bearer(caller))
            assert answer.status_code == 200, answer.text
            return list(answer.json()["data"])

        mine = await usage(two)
        ids = [record.id for _, record in made]
        assert sorted((row["key"], row["requests"]) for row in mine) == sorted([(ids[0], 2), (ids[1], 1)])
        first = next(row for row in mine if row["key"] == ids[0])
        assert (first["completion_tokens"], first["cached_tokens"], first["model"]) == (6, 2, MODEL)
        assert first["prompt_tokens"] > 0 and re.fullmatch(r"\d{4}-\d\d-\d\d", first["date"])
        assert {row["tenant"] for row in await usage(admin)} == {"acme", "other"}
        assert [row["tenant"] for row in await usage(admin, tenant="other")] == ["other"]
        assert await usage(admin, key=ids[1]) == [row for row in mine if row["key"] == ids[1]]
        assert await usage(one, model="none") == await usage(one, start="2020-01-01", end="2020-01-31") == []
        for query, status, param in (
            ({"tenant": "other"}, 403, "tenant"),
            ({"start": "soon"}, 400, "start"),
            ({"start": "2020-01-01"}, 400, "end"),
        ):
            answer = await g.http.get("/v1/usage", params=query, headers=bearer(one))
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
