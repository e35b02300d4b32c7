"""What must be left in Redis after any run: nothing that waits, nothing that stays for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from shared import keys
from shared.keys import GROUP

#: Seconds until all must be in order: some of it is the gateways' sweep to do.
PATIENCE_S = 20.0
#: Ends of names of keys that need not expire.
_MAY_STAY = (
    "}:card", "}:tok", "}:lora", "}:workers", "}:dead",
    *(keys.webhook_state(what) for what in ("counts", "secrets")),
    *(keys.adapters(what) for what in ("names", "draining", "unused", "revision")),
    *(keys.access(what) for what in ("keys", "tenants")),
)  # fmt: skip


async def settle(client: Any, pool: str, lanes: int, patience_s: float = PATIENCE_S) -> list[str]:
    """What is not in order when time is up; empty as soon as all is."""
    until = time.monotonic() + patience_s
    while True:
        found = await leftovers(client, pool, lanes)
        if not found or time.monotonic() > until:
            return found
        await asyncio.sleep(0.5)


async def leftovers(client: Any, pool: str, lanes: int) -> list[str]:
    """What is not in order now."""
    live = {owner.decode() for owner in await client.zrange(keys.workers(pool), 0, -1)}
    found = await everlasting(client)
    for lane in range(lanes):
        counters = await client.hgetall(keys.stats(pool, lane))
        for field, value in sorted(counters.items()):
            if field.startswith((b"delayed", b"queued", b"running", b"a:")) and int(value) != 0:
                found.append(f"lane {lane}: {field.decode()} is {int(value)}")
        for stream in keys.lane_streams(pool, lane):
            found += await _stream(client, stream, live)
    return found


async def _stream(client: Any, stream: str, live: set[str]) -> list[str]:
    if not await client.exists(stream):
        return []
    found = []
    if length := await client.xlen(stream):
        found.append(f"{stream} holds {length} entries")
    if not await client.xinfo_groups(stream):
        return found
    if pending := (await client.xpending(stream, GROUP))["pending"]:
        found.append(f"{stream} has {pending} entries pending")
    for consumer in await client.xinfo_consumers(stream, GROUP):
        if consumer["name"].decode() not in live:
            found.append(f"{stream} has the consumer {consumer['name'].decode()}, whose worker does not live")
    return found


async def everlasting(client: Any) -> list[str]:
    """Keys that never expire, but for pools' cards, tokenizers and registries, and what waits for an operator."""
    found = []
    async for name in client.scan_iter("*", count=1000):
        text = name.decode()
        if (
            not text.startswith("rq:")  # RQ's own, which cleans up after itself in its own time
            and text not in (keys.pools(), keys.token_secret())
            and not text.endswith(_MAY_STAY)
            and await client.pttl(name) == -1
        ):
            found.append(f"{text} never expires")
    return found
