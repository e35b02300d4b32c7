"""Connections that are closed a moment before they are written to, on the event loop that gateways run on."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio
import uvloop

from shared import keys
from shared.connect import connect, connect_pubsub
from shared.jobstore import JobStore


def test_a_command_on_a_connection_that_was_just_closed_is_tried_again(valkey_url: str) -> None:
    async def commands() -> None:
        client = connect(valkey_url)
        store = JobStore(client)
        node: Any = client
        if not isinstance(client, redis.asyncio.Redis):
            node = client.at(await client.primary(keys.card("pool")))
        connection = await node.connection_pool.get_connection()
        await node.connection_pool.release(connection)
        connection._writer.transport.abort()
        assert await store.get_card("pool") is None
        await client.aclose()

    uvloop.run(commands())


def test_a_subscription_on_a_connection_that_was_just_closed_fails_as_a_lost_one(valkey_url: str) -> None:
    async def subscribe() -> None:
        client: Any = connect_pubsub(valkey_url)
        connection = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        try:
            await connection.send_command("SUBSCRIBE", "x", check_health=False)
        except redis.ConnectionError:
            await asyncio.sleep(0)
        else:
            raise AssertionError("nobody noticed")
        finally:
            await client.connection_pool.release(connection)
            await client.aclose()

    uvloop.run(subscribe())
