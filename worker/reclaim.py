"""When this worker may take jobs whose lease has run out.

After an outage of Redis everybody's entries look idle, because nobody could renew. So nobody reclaims for one lease
after its own (re)connection, and what it reclaims first after an outage is not charged to the job.
"""

from __future__ import annotations

import time

import redis
from redis.asyncio.connection import AbstractConnection

from shared.jobs import Lease


class ReclaimRule:
    """Watches the connection that pulls are made on."""

    def __init__(self, lanes: int, lease_s: float, max_attempts: int) -> None:
        self._lanes, self._lease_s, self._max_attempts = lanes, lease_s, max_attempts
        self._away = True
        self._fresh = True
        self._reclaim_after = float("inf")
        self._uncharged: set[int] = set()

    async def connected(self, connection: AbstractConnection) -> None:
        """The client's `redis_connect_func`.

        redis-py reconnects silently. The command that it does so for was made under the old connection's rule, so it
        fails here and is made again.

        Raises:
            redis.ConnectionError: the connection had been lost and nobody knew.
        """
        await connection.on_connect()
        if not self._away:
            self._away = True
            raise redis.ConnectionError("the connection was lost")

    def failed(self) -> None:
        """A pull failed."""
        self._away = True

    def lease(self, lane: int) -> Lease:
        """For the next pull from a lane."""
        reclaim = not self._away and time.monotonic() >= self._reclaim_after
        charge = lane not in self._uncharged
        return Lease(round(self._lease_s * 1e3), self._max_attempts, reclaim, charge)

    def answered(self, lane: int, lease: Lease) -> None:
        """A pull from a lane was answered."""
        if self._away:
            self._away = False
            self._reclaim_after = time.monotonic() + self._lease_s
            # At the start nothing was seen of an outage: a job that killed the last worker must not go free for ever.
            self._uncharged = set() if self._fresh else set(range(self._lanes))
            self._fresh = False
        elif lease.reclaim:
            self._uncharged.discard(lane)
