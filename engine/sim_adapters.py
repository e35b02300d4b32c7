"""Adapters of `SimEngine`: real library and slots, and weights that only say whose they are. Needs no torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.library import AdapterLibrary, AdapterSource
from engine.adapters.tiers import AdapterTiers
from engine.request import AdapterStats
from shared.errors import RopewayError
from shared.lora.files import content_identity

#: What an adapter of the simulated model may change, as inputs and outputs.
SIM_MODULES = {f"model.layers.0.self_attn.{name}": (8, 8) for name in ("q_proj", "v_proj")}


@dataclass(frozen=True, slots=True)
class SimAdapter:
    """An adapter of which nothing but the identity counts."""

    identity: str


class _NoFiles:
    """Has every adapter, without any file: a folder's name is the identity."""

    def folder(self, identity: str) -> Path:
        """Of this name; nobody looks whether it is there."""
        return Path(identity)

    def discard(self, identity: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nobody waits."""


class SimAdapters:
    """What a simulated engine does with adapters; nothing where it serves none.

    Args:
        slots: on the device; 0: none are served.
        max_bypasses: admissions past a sequence without a slot after which it claims one.
        source: has the adapters' folders, whose content is hashed; None: any identity will do.
    """

    def __init__(
        self, slots: int, max_cpu_loras: int, load_ms: float, max_bypasses: int, source: AdapterSource | None
    ) -> None:
        self._max_bypasses = max_bypasses
        self._tiers: AdapterTiers[SimAdapter] | None = None
        if slots:
            read = _reading(load_ms, content_identity if source is not None else lambda folder: folder.name)
            self._tiers = AdapterTiers(AdapterLibrary(read, max_cpu_loras, source=source or _NoFiles()), slots)

    @property
    def library(self) -> AdapterLibrary[SimAdapter] | None:
        """None where no adapters are served."""
        return None if self._tiers is None else self._tiers.library

    @property
    def awaited(self) -> bool:
        """Whether one is being read that somebody wants."""
        return self._tiers is not None and self._tiers.library.awaited

    def keep(self, pinned: Mapping[str, str], retired: Collection[str]) -> None:
        """See `EngineProtocol.keep_adapters`."""
        if self._tiers is not None:
            self._tiers.keep(pinned, retired)

    def want(self, adapter: str | None, name: str) -> None:
        """A request begins."""
        if self._tiers is not None and adapter is not None:
            self._tiers.library.want(adapter, name)

    def let_go(self, adapter: str | None) -> None:
        """A request is over."""
        if self._tiers is not None and adapter is not None:
            self._tiers.let_go(adapter)

    def poll(self, timeout: float) -> dict[str, RopewayError]:
        """Take in what was read, and answer what could not be."""
        return {} if self._tiers is None else self._tiers.library.poll(timeout)

    def begin(self) -> None:
        """A new step."""
        if self._tiers is not None:
            self._tiers.slots.begin()

    def ready(self, adapter: str | None) -> bool:
        """Whether a sequence could be admitted now."""
        return self._tiers is None or adapter is None or self._tiers.slots.available(adapter)

    def has_slot(self, adapter: str | None, bypassed: int, preempted: bool) -> bool:
        """The same; a sequence that was passed often enough, or preempted, claims a slot."""
        if self.ready(adapter):
            return True
        assert self._tiers is not None
        assert adapter is not None
        if preempted or bypassed >= self._max_bypasses:
            self._tiers.slots.claim(adapter)
        return self._tiers.slots.available(adapter)

    def acquire(self, adapter: str | None) -> None:
        """A sequence is admitted."""
        if self._tiers is not None and adapter is not None:
            self._tiers.slots.acquire(adapter)

    def release(self, adapter: str | None) -> None:
        """It leaves the batch."""
        if self._tiers is not None and adapter is not None:
            self._tiers.slots.release(adapter)

    def fill(self) -> None:
        """Bring adapters to their slots."""
        if self._tiers is not None:
            for slot, identity in self._tiers.slots.take_fills():
                self._tiers.filled(slot, identity)

    def stats(self, uses: Iterable[tuple[str | None, bool]]) -> AdapterStats:
        """A snapshot; see `AdapterTiers.stats`."""
        if self._tiers is None:
            return AdapterStats()
        return self._tiers.stats((adapter, running) for adapter, running in uses if adapter is not None)

    def check(self, running: Iterable[str | None], live: Iterable[str | None]) -> None:
        """Verify counts against sequences in the batch and live requests. Raises AssertionError."""
        if self._tiers is not None:
            self._tiers.slots.check(Counter(adapter for adapter in running if adapter is not None))
            self._tiers.library.check(Counter(adapter for adapter in live if adapter is not None))


def _reading(load_ms: float, identity_of: Callable[[Path], str]) -> Callable[[Path], SimAdapter]:
    def read(folder: Path) -> SimAdapter:
        time.sleep(load_ms / 1e3)
        return SimAdapter(identity_of(folder))

    return read
