"""When this worker may take jobs whose lease has run out.

After an outage of Redis everybody's entries look idle, because nobody could renew. So nobody reclaims for one lease
after its own (re)connection, and what it reclaims first after an outage is not charged to the job. In a cluster that
holds for each node, and a lane that is served by another node than before has had an outage: its primary failed over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import redis
from redis.asyncio.connection import AbstractConnection

from shared.jobs import Lease


@dataclass(slots=True)
class _Node:
    """A node as seen over the connection that pulls are made on.

    Attributes:
        away: the connection was lost, or no pull was answered over it yet.
        reclaim_after: monotonic seconds.
        outages: whether any was seen. At the start none was: a job that killed the last worker must not go free.
        charged: lanes in which reclaims are charged again after an outage.
    """

    away: bool = True
    reclaim_after: float = float("inf")
    outages: bool = False
    charged: set[int] = field(default_factory=set)


class ReclaimRule:
    """Watches the connections that pulls are made on, one per node. Pulls are made one at a time."""

    def __init__(self, lease_s: float, max_attempts: int) -> None:
        self._lease_s, self._max_attempts = lease_s, max_attempts
        self._nodes: dict[str, _Node] = {}
        self._served_by: dict[int, str] = {}
        self._reclaiming = False

    async def connected(self, connection: AbstractConnection, node: str) -> None:
        """See `shared.connect.Connected`.

        redis-py reconnects silently. The command that it does so for was made under the old connection's rule, so it
        fails here and is made again.

        Raises:
            redis.ConnectionError: the connection had been lost and nobody knew, or another node serves the lane by now.
        """
        await connection.on_connect()
        unnoticed = self._reclaiming or not self._node(node).away
        self._lost(node)
        if unnoticed:
            raise redis.ConnectionError("the connection was lost")

    def failed(self, node: str) -> None:
        """A pull from a lane of this node failed."""
        self._reclaiming = False
        self._lost(node)

    def lease(self, lane: int, node: str) -> Lease:
        """For the next pull from a lane."""
        seen = self._node(node)
        reclaim = not seen.away and time.monotonic() >= seen.reclaim_after
        self._reclaiming = reclaim
        return Lease(round(self._lease_s * 1e3), self._max_attempts, reclaim, not seen.outages or lane in seen.charged)

    def answered(self, lane: int, node: str, lease: Lease) -> None:
        """A pull from a lane was answered, by this node."""
        self._reclaiming = False
        seen = self._node(node)
        if self._served_by.get(lane, node) != node:
            seen.outages = True
        self._served_by[lane] = node
        if seen.away:
            seen.away = False
            seen.reclaim_after = time.monotonic() + self._lease_s
        elif lease.reclaim:
            seen.charged.add(lane)

    def _lost(self, node: str) -> None:
        seen = self._node(node)
        if not seen.away:
            seen.away, seen.outages = True, True
            seen.charged.clear()

    def _node(self, name: str) -> _Node:
        return self._nodes.setdefault(name, _Node())
