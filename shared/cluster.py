"""A Redis Cluster as a set of plain clients, one per node, and a map that says which of them serves a key.

redis-py's own cluster client is not used, because it lets one node's failure reach the others: a pipeline over several
nodes fails as a whole and drops the connections to all of them. While a primary fails over, for seconds, no lease
could be renewed and no frame published in lanes that live on healthy nodes. It also refuses a command instead of
letting it wait for a connection. Here connections, pools, time-outs and retries are those of redis-py's client for one
server; what is sent where, and where to after a redirection, is in `shared.calls`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import redis
import redis.asyncio
import redis.exceptions

from shared.redis_url import Address
from shared.slot_map import SlotMap

#: What a question for the map may raise and the next node may answer.
_AWAY: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
#: Nodes that a client for threads sends to at the same time.
_THREADS: Final = 8


class Cluster:
    """The cluster for asyncio.

    Args:
        slots: with the nodes to ask first.
        client: makes the client of a node.
        scout: makes a client of a node that asks once, does not try again, and is closed.
    """

    def __init__(
        self,
        slots: SlotMap,
        client: Callable[[Address], redis.asyncio.Redis],
        scout: Callable[[Address], redis.asyncio.Redis],
    ) -> None:
        self.slots = slots
        self._make, self._scout = client, scout
        self._clients: dict[Address, redis.asyncio.Redis] = {}
        self._asking = asyncio.Lock()

    async def primary(self, key: str) -> Address:
        """The node that serves a key.

        Raises:
            redis.ConnectionError: no node of the cluster can be reached.
            redis.exceptions.ClusterDownError: no node serves the key.
        """
        # While one asks the others go by what is known.
        if self.slots.must_ask() and not (self.slots.known and self._asking.locked()):
            async with self._asking:
                if self.slots.must_ask():
                    await self._ask()
        return _found(self.slots, key)

    def at(self, node: Address) -> redis.asyncio.Redis:
        """The client of a node. It stays until `aclose`, also when the node has left: it may come back."""
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = self._make(node)
        return client

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def _ask(self) -> None:
        error: Exception | None = None
        for node in self.slots.candidates():
            scout: Any = self._scout(node)
            try:
                if self.slots.learn(await scout.execute_command("CLUSTER SLOTS"), node):
                    return
            except _AWAY as failure:
                error = failure
            finally:
                await scout.aclose()
        if not self.slots.known:
            raise error or redis.ConnectionError("none of the nodes serves a cluster")


class SyncCluster:
    """The same for threads."""

    def __init__(
        self, slots: SlotMap, client: Callable[[Address], redis.Redis], scout: Callable[[Address], redis.Redis]
    ) -> None:
        self.slots = slots
        self._make, self._scout = client, scout
        self._clients: dict[Address, redis.Redis] = {}
        self._asking = threading.Lock()
        #: For pipelines to several nodes at once, and the nodes whose last one has not come back.
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="redis")
        self.late: set[Address] = set()

    def primary(self, key: str) -> Address:
        """See `Cluster.primary`."""
        if self.slots.must_ask() and not (self.slots.known and self._asking.locked()):
            with self._asking:
                if self.slots.must_ask():
                    self._ask()
        return _found(self.slots, key)

    def at(self, node: Address) -> redis.Redis:
        """See `Cluster.at`."""
        client = self._clients.get(node)
        if client is None:
            client = self._clients.setdefault(node, self._make(node))
        return client

    def keep_late(self, node: Address, pipeline: Future[Any]) -> None:
        """Remember that a node has not answered yet, until it does or its time is up."""
        self.late.add(node)
        pipeline.add_done_callback(lambda _: self.late.discard(node))

    def close(self) -> None:
        """Close all connections."""
        self.threads.shutdown(wait=False)
        for client in self._clients.values():
            client.close()

    def _ask(self) -> None:
        error: Exception | None = None
        for node in self.slots.candidates():
            scout: Any = self._scout(node)
            try:
                if self.slots.learn(scout.execute_command("CLUSTER SLOTS"), node):
                    return
            except _AWAY as failure:
                error = failure
            finally:
                scout.close()
        if not self.slots.known:
            raise error or redis.ConnectionError("none of the nodes serves a cluster")


def node_name(node: Address) -> str:
    """How a node is called where nodes are told apart."""
    return f"{node[0]}:{node[1]}"


def _found(slots: SlotMap, key: str) -> Address:
    node = slots.primary(key)
    if node is None:
        raise redis.exceptions.ClusterDownError("no node serves this key's slot")
    return node
