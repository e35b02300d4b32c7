"""Library and slots of one engine together: what is where, what is counted of it, and what leaves both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Generic

from engine.adapters.library import A, AdapterLibrary
from engine.adapters.slots import AdapterSlots
from engine.request import AdapterStats

#: Of one request: its adapter, and whether it is in the batch.
Use = tuple[str, bool]


class AdapterTiers(Generic[A]):
    """The two tiers below the store. All calls come from the engine's thread.

    Args:
        count: slots on the device.
    """

    def __init__(self, library: AdapterLibrary[A], count: int) -> None:
        self.library = library
        self.slots = AdapterSlots(count, library.__contains__)
        self._count = count
        self._held: dict[int, str] = {}
        self._fills = self._evictions = 0

    def let_go(self, identity: str) -> None:
        """A request is over: of an adapter that is to leave it may have been the last."""
        self.library.let_go(identity)
        if self.library.retired(identity):
            self.evict(identity)

    def keep(self, pinned: Mapping[str, str], retired: Collection[str]) -> None:
        """See `EngineProtocol.keep_adapters`."""
        self.library.retire(retired)
        self.library.pin(pinned)
        for identity in self.slots.resident:
            if self.library.retired(identity):
                self.evict(identity)

    def filled(self, slot: int, identity: str) -> None:
        """An adapter was brought to a slot."""
        self._fills += 1
        self._evictions += slot in self._held
        self._held[slot] = identity

    def evict(self, identity: str) -> None:
        """Free an adapter's slot, unless a sequence uses it."""
        slot = self.slots.resident.get(identity)
        if slot is not None and self.slots.evict(identity):
            self._evictions += self._held.pop(slot, None) is not None

    def stats(self, uses: Iterable[Use]) -> AdapterStats:
        """A snapshot, given the live requests that have an adapter."""
        library, resident = self.library, self.slots.resident
        states: Counter[str] = Counter()
        for identity, running in uses:
            there = identity in library or identity in resident
            states["running" if running else "waiting" if there else "loading"] += 1
        return AdapterStats(
            slots=self._count,
            resident=list(resident),
            in_memory=library.in_memory,
            loading=library.loading,
            failed=library.failed,
            failed_at=library.failed_at,
            loads=library.loads,
            load_failures=library.load_failures,
            load_seconds=list(library.load_seconds),
            fills=self._fills,
            evictions=self._evictions,
            loading_requests=states["loading"],
            waiting_requests=states["waiting"],
            running_requests=states["running"],
        )
