"""Redis's clock as this process sees it: deadlines are in its milliseconds."""

from __future__ import annotations

import time


class RedisClock:
    """Estimates Redis's time from the last reading and the local monotonic clock."""

    def __init__(self) -> None:
        self._offset_ms = time.time() * 1e3 - time.monotonic() * 1e3

    def set(self, now_ms: int) -> None:
        """Take over a reading."""
        self._offset_ms = now_ms - time.monotonic() * 1e3

    def now_ms(self) -> float:
        """Unix milliseconds."""
        return self.at_ms(time.monotonic())

    def at_ms(self, monotonic_s: float) -> float:
        """Unix milliseconds of a moment on the local monotonic clock."""
        return monotonic_s * 1e3 + self._offset_ms
