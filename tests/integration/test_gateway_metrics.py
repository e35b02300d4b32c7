"""The gateway's metrics over HTTP: zeros before anybody asks, and examples for who can read them."""

from __future__ import annotations

import asyncio

from tests.integration.gateway_harness import completion, serve
from tests.unit.gateway import support

TRACE = "0af7651916cd43dd8448eb211c80319c"
OPEN = {"Accept": "application/openmetrics-text; version=1.0.0; charset=utf-8"}


async def test_what_is_known_is_zero_before_anybody_asks(valkey_url: str) -> None:
    async with serve(valkey_url, pools=["expected"]) as gateway:
        assert (await gateway.http.get("/ready")).status_code == 200  # the pool's card is read
        response = await gateway.http.get("/metrics")
        lines = response.text.splitlines()
    assert response.headers["content-type"].startswith("text/plain")
    for model in (support.MODEL, "expected"):
        for line in (
            f'ropeway_gateway_time_to_first_token_seconds_count{{model="{model}"}} 0.0',
            f'ropeway_gateway_request_prompt_tokens_count{{model="{model}"}} 0.0',
            f'ropeway_gateway_generation_tokens_total{{model="{model}"}} 0.0',
            f'ropeway_gateway_jobs_total{{model="{model}",outcome="overloaded"}} 0.0',
        ):
            assert line in lines
    for line in (
        'ropeway_http_requests_total{method="POST",route="/v1/chat/completions",status="503"} 0.0',
        'ropeway_http_request_seconds_count{route="/v1/jobs/{job_id}"} 0.0',
        'ropeway_gateway_swept_jobs_total{status="restored"} 0.0',
    ):
        assert line in lines


async def test_samples_name_the_trace_of_their_request(valkey_url: str) -> None:
    async with serve(valkey_url) as gateway:
        body = completion(stream=True)
        headers = {"traceparent": f"00-{TRACE}-{'1' * 16}-01"}
        asked = asyncio.create_task(gateway.http.post("/v1/completions", json=body, headers=headers))
        await (await gateway.worker.pull()).answer("a", "b")
        assert (await asked).status_code == 200
        response = await gateway.http.get("/metrics", headers=OPEN)
        plain = await gateway.http.get("/metrics")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n") and TRACE not in plain.text
    named = {
        line.partition("_bucket{")[0] for line in response.text.splitlines() if f'# {{trace_id="{TRACE}"}}' in line
    }
    assert named >= {
        "ropeway_gateway_time_to_first_token_seconds",
        "ropeway_gateway_e2e_request_latency_seconds",
        "ropeway_gateway_queue_time_seconds",
        "ropeway_http_request_seconds",
    }
    counted = 'ropeway_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0'
    assert counted in plain.text.splitlines(), "under the very labels that were there as zero"
