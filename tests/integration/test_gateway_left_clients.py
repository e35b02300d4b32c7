"""A thousand clients who leave, at whatever moment: their jobs end, and no key of them stays for ever."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from typing import Any

from shared.protocol import FINAL_STATUSES
from shared.upkeep import Upkeep
from tests.integration.gateway_harness import running
from tests.support.chaos.aftermath import everlasting
from tests.support.worker_harness import POOL, harness

CLIENTS = 1000
#: Connections at a time.
AT_ONCE = 50


async def leave(url: str, chance: random.Random) -> None:
    """Ask, wait for a while or for some bytes of the answer, hang up."""
    host, port = url.removeprefix("http://").split(":")
    body: dict[str, Any] = {"model": POOL, "ignore_eos": True, "max_tokens": chance.choice([1, 20, 3000]), "n": 1}
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/jobs"])
    body |= {"prompt": "x"} if path.endswith("/completions") and "chat" not in path else {"messages": [MESSAGE]}
    if path == "/v1/jobs":
        # Jobs of those who only submit go on: let them be short.
        body = {"kind": "chat", "body": body | {"max_tokens": 5}}
    else:
        body["stream"] = chance.random() < 0.5
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
    if chance.random() < 0.5:
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01, 0.05]))
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await reader.read(chance.choice([1, 400, 4000]))
    writer.transport.abort()


MESSAGE = {"role": "user", "content": "hello"}


async def test_no_key_of_theirs_stays(valkey_url: str) -> None:
    async with harness(valkey_url) as h, running(valkey_url, disconnect_grace_s=0.0) as (url, services):
        await h.worker(sim_step_ms=2, max_num_seqs=32)
        async with asyncio.timeout(30):
            while not services.catalogue.pools:
                await asyncio.sleep(0.05)
        store = Upkeep(h._commands)
        for start in range(0, CLIENTS, AT_ONCE):
            await asyncio.gather(*(leave(url, random.Random(start + n)) for n in range(AT_ONCE)))
            assert await everlasting(h.client) == [], "while they run no less than afterwards"
        jobs = [job_id async for job_id in store.job_ids(POOL)]
        assert len(jobs) > CLIENTS // 4
        async with asyncio.timeout(120):
            for job_id in jobs:
                while (await store.status(job_id))[0] not in FINAL_STATUSES:
                    await asyncio.sleep(0.02)
        ends = Counter([(await store.status(job_id))[0] for job_id in jobs])
        assert ends["cancelled"] > 20 and ends["completed"] > 20, "they left at all moments"
        await services.submitter.idle()
        assert services.hub.streams == 0
        assert await everlasting(h.client) == []
        await h.assert_clean()
