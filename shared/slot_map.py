"""Which nodes a Redis Cluster has and which of them serves a slot, as the nodes told last. No I/O."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis.cluster import parse_cluster_slots
from redis.crc import key_slot

from shared.redis_url import Address

#: Seconds between two questions for the map, however many commands fail meanwhile.
ASK_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Told:
    """One node's answer. `moved` are corrections since, by slot."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    primaries: list[Address] = field(default_factory=list)
    nodes: frozenset[Address] = frozenset()
    moved: dict[int, Address] = field(default_factory=dict)


class SlotMap:
    """The map of one client. Every answer replaces it as a whole, so threads may read it at any time.

    Args:
        seeds: nodes to ask first, and again when all that were heard of are gone.
    """

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._seeds = tuple(seeds)
        self._told = _Told()
        self._failed: Address | None = None
        self._stale = True
        self._asked_at = float("-inf")

    @property
    def known(self) -> bool:
        """Whether any node has answered yet."""
        return bool(self._told.nodes)

    @property
    def nodes(self) -> Sequence[Address]:
        """Every node, primaries and replicas."""
        return sorted(self._told.nodes)

    @property
    def primaries(self) -> Sequence[Address]:
        """Every node that serves slots."""
        return sorted(set(self._told.primaries))

    def primary(self, key: str) -> Address | None:
        """The node that serves a key; None if no node does."""
        slot, told = key_slot(key.encode()), self._told
        if (moved := told.moved.get(slot)) is not None:
            return moved
        index = bisect_right(told.starts, slot) - 1
        return told.primaries[index] if index >= 0 and slot <= told.ends[index] else None

    def must_ask(self) -> bool:
        """Whether it is time to ask a node for the map."""
        return not self.known or (self._stale and time.monotonic() - self._asked_at >= ASK_EVERY_S)

    def candidates(self) -> list[Address]:
        """Whom to ask, in chance order; a node that has just failed comes last."""
        self._asked_at = time.monotonic()
        nodes = list(self._told.nodes)
        random.shuffle(nodes)
        nodes += [seed for seed in self._seeds if seed not in nodes]
        return sorted(nodes, key=lambda node: node == self._failed)

    def learn(self, answer: Any, asked: Address) -> bool:
        """Take over a node's answer to CLUSTER SLOTS; False if it serves no cluster, and then nothing changes."""
        ranges = sorted(parse_cluster_slots(answer, current_host=asked[0]).items())
        if not ranges:
            return False
        told = [_address(node) for _, owners in ranges for node in (owners["primary"], *owners["replicas"])]
        self._told = _Told(
            starts=[start for (start, _), _ in ranges],
            ends=[end for (_, end), _ in ranges],
            primaries=[_address(owners["primary"]) for _, owners in ranges],
            nodes=frozenset(told),
        )
        self._stale = False
        return True

    def moved(self, slot: int, node: Address) -> None:
        """A node said who serves a slot. Others may have moved with it."""
        self._told.moved[slot] = node
        self._stale = True

    def failed(self, node: Address) -> None:
        """A node did not answer, or says that the cluster is down."""
        self._failed, self._stale = node, True


def _address(node: tuple[str, int]) -> Address:
    return node[0], int(node[1])
