"""`submit_replicas` over HTTP: what too few replicas have is refused, and nothing of it goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.gateway_harness import chat, serve


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/chat/completions", chat(stream=True)),
        ("/v1/jobs", {"kind": "chat", "body": chat()}),
    ],
)
async def test_what_too_few_replicas_have_is_refused_and_taken_back(
    valkey_url: str, path: str, body: dict[str, Any]
) -> None:
    async with serve(valkey_url, submit_replicas=2, submit_replica_timeout_ms=50) as gateway:
        response = await gateway.http.post(path, json=body)
        assert response.status_code == 503 and float(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert error["code"] == "service_unavailable" and "replicas" in error["message"]
        await gateway.services.submitter.idle()
        assert await gateway.worker.queued() == 0
