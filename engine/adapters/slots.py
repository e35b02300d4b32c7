"""Which adapters are on the device, and whose turn it is. Policy only: no torch.

A slot holds one adapter and is pinned while sequences use it. Where all are pinned, an adapter whose sequences have
waited long enough claims one. A claimed slot still takes sequences of the adapter in it until the first of those that
use it has ended, since it would not be empty before either, and each visit of an adapter costs a slot about the length
of a sequence however many share it. From then on none is admitted, so the slot empties and changes hands. Claims are
made anew for each step, from those that wait then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(slots=True)
class _Slot:
    """What a slot holds, and for whom.

    Attributes:
        users: running sequences.
        used_at: turn of the last admission, 0 for never.
        ended: whether a sequence of those that used it since it was last empty is over.
        claimed_by: the adapter that is to have it next.
        closed: whether the claim lets no more sequences in.
    """

    identity: str | None = None
    users: int = 0
    used_at: int = 0
    ended: bool = False
    claimed_by: str | None = None
    closed: bool = False


class AdapterSlots:
    """Reference-counted slots with LRU eviction.

    Args:
        count: slots on the device.
        in_memory: whether an adapter's weights are in memory, so that a slot can be filled at once.
    """

    def __init__(self, count: int, in_memory: Callable[[str], bool]) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._in_memory = in_memory
        self._turn = 0
        self._fills: dict[int, str] = {}

    @property
    def resident(self) -> dict[str, int]:
        """Slots by adapter."""
        return {slot.identity: index for index, slot in enumerate(self._slots) if slot.identity is not None}

    def users(self, identity: str) -> int:
        """Running sequences of an adapter."""
        return sum(slot.users for slot in self._slots if slot.identity == identity)

    def begin(self) -> None:
        """A new step: claims are made again by those that still wait."""
        for slot in self._slots:
            slot.claimed_by, slot.closed = None, False

    def available(self, identity: str) -> bool:
        """Whether a sequence of the adapter could be admitted now."""
        for slot in self._slots:
            if slot.identity == identity:
                return slot.claimed_by in (None, identity) or not slot.closed
        return self._in_memory(identity) and self._place(identity) is not None

    def acquire(self, identity: str) -> int:
        """Pin the adapter for one more sequence, after `available`; the slot that it is in, or is to be filled with."""
        self._turn += 1
        index = self.resident.get(identity)
        if index is None:
            index = self._place(identity)
            if index is None:
                raise RuntimeError(f"no slot for adapter {identity}")
            self._slots[index].identity = identity
            self._fills[index] = identity
        slot = self._slots[index]
        if not slot.users:
            slot.ended = False
        slot.users, slot.used_at = slot.users + 1, self._turn
        return index

    def release(self, identity: str) -> None:
        """One sequence less."""
        slot = self._slots[self.resident[identity]]
        if slot.users < 1:
            raise RuntimeError(f"adapter {identity} is released more often than acquired")
        slot.users, slot.ended = slot.users - 1, True

    def can_claim(self, identity: str) -> bool:
        """Whether nothing but a slot is missing."""
        return identity not in self.resident and self._in_memory(identity)

    def claim(self, identity: str, *, at_once: bool = False) -> None:
        """Its sequences have waited long enough: the slot that will be empty first is its own when it is.

        Args:
            at_once: let no more sequences into that slot, even if none has ended yet.
        """
        if not self.can_claim(identity):
            return
        free = [slot for slot in self._slots if slot.claimed_by is None]
        if free and all(slot.claimed_by != identity for slot in self._slots):
            slot = min(free, key=lambda slot: (slot.users, slot.used_at))
            slot.claimed_by, slot.closed = identity, at_once or slot.ended or not slot.users

    def evict(self, identity: str) -> bool:
        """Take an adapter that nobody uses off the device; False while somebody does."""
        index = self.resident.get(identity)
        if index is not None and not self._slots[index].users:
            self._slots[index] = _Slot()
            self._fills.pop(index, None)
            return True
        return index is None

    def take_fills(self) -> list[tuple[int, str]]:
        """Slots to fill before the next pass, each with its adapter; once."""
        fills, self._fills = sorted(self._fills.items()), {}
        return fills

    def check(self, users: Mapping[str, int]) -> None:
        """Compare with the running sequences of each adapter.

        Raises:
            AssertionError: they differ, or an adapter is in two slots.
        """
        held = [slot.identity for slot in self._slots if slot.identity is not None]
        if len(set(held)) != len(held):
            raise AssertionError(f"an adapter is in two slots: {held}")
        counted = {slot.identity: slot.users for slot in self._slots if slot.users}
        if counted != {identity: count for identity, count in users.items() if count}:
            raise AssertionError(f"slots count {counted}, there are {dict(users)}")

    def _place(self, identity: str) -> int | None:
        """An unused slot: the one that it has claimed, or the one that was used longest ago."""
        unused = [index for index, slot in enumerate(self._slots) if not slot.users]
        mine = [index for index in unused if self._slots[index].claimed_by == identity]
        open_to_all = [index for index in unused if self._slots[index].claimed_by is None]
        return min(mine or open_to_all, key=lambda index: self._slots[index].used_at, default=None)


def outranked(running: Iterable[Sequence], priority: int) -> list[Sequence]:
    """The fewest sequences that hold a slot together and are all of a lower class than this one."""
    users: dict[str, list[Sequence]] = {}
    for sequence in running:
        if sequence.adapter is not None:
            users.setdefault(sequence.adapter, []).append(sequence)
    lower = [group for group in users.values() if all(sequence.priority > priority for sequence in group)]
    return min(lower, key=len, default=[])
