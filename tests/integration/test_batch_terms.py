"""A batch's lines are bound by what its tenant may, and count for the key that made it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from shared.batch_record import BatchRecord
from shared.batches import new_batch_id, new_file_id
from shared.connect import connect
from shared.usage import UsageStore
from tasks.batch_engine import line_runner
from tests.integration.gateway_harness import chat, serve
from tests.support.keys import access_to, grant

KEY_ID = "k" * 12


def batch() -> BatchRecord:
    return BatchRecord(
        id=new_batch_id(),
        tenant="acme",
        authenticated=True,
        key=KEY_ID,
        endpoint="/v1/chat/completions",
        input_file=new_file_id(),
        created_ms=1_700_000_000_000,
        expires_ms=1_700_000_000_000,
    )


def line(**body: Any) -> bytes:
    return json.dumps(chat(max_tokens=5, **body)).encode()


async def test_models_weight_and_usage_are_those_of_tenant_and_key(valkey_url: str) -> None:
    async with serve(valkey_url) as g, access_to(valkey_url) as access:
        await grant(access, models=["other"], weight=3.0)
        async with line_runner(batch(), valkey_url, lambda: False, 4) as runner:
            refused = await runner.run(0, line(), 60)
            assert refused is not None and refused.status == 403
            assert json.loads(refused.body)["error"]["code"] == "model_not_allowed"
        await grant(access, models=None)
        async with line_runner(batch(), valkey_url, lambda: False, 4) as runner:
            running = asyncio.create_task(runner.run(1, line(), 60))
            job = await g.worker.pull()
            envelope = job.job.envelope
            assert (envelope.tenant, envelope.key, envelope.weight) == ("acme", KEY_ID, 3.0)
            await job.answer("a", "b")
            done = await running
            assert done is not None and done.status == 200
            await runner.forget(done.job_ids)
        client = connect(valkey_url)
        usage = UsageStore(client)
        (row,) = await usage.usage([await usage.today()], "acme")
        await client.aclose()
        assert (row.key, row.requests, row.completion_tokens) == (KEY_ID, 1, 2)
