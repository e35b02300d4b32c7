"""Stop strings over streamed text: what may be sent, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    It holds back only that end of the text which may still become a stop string. A match is cut at its start, or behind
    its end if `include`; then nothing is held back at all.
    """

    __slots__ = ("_context", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Of two that begin at one place the shorter is complete first.
        self._stops = sorted(stops, key=len)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        # Held back; with `include` it is text already given out in which a match may begin.
        self._context = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text that may be sent now, and the stop string that was matched.

        A match must end within `text`; unless `armed` there is none. After a match nothing more may be fed.
        """
        region = self._context + text
        match = self._find(region, len(self._context)) if armed and text else None
        if match is not None:
            start, stop = match
            given = len(self._context) if self._include else 0
            end = start + len(stop) if self._include else start
            self._context = ""
            return region[given:end], stop
        if self._include:
            self._context = region[max(0, len(region) - self._longest + 1) :]
            return text, None
        cut = len(region) - self._partial(region)
        self._context = region[cut:]
        return region[:cut], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held = "" if self._include else self._context
        self._context = ""
        return held

    def _find(self, region: str, old: int) -> tuple[int, str] | None:
        """The match that starts first of those that end behind the first `old` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = region.find(stop, max(0, old + 1 - len(stop)))
            if start >= 0 and (best is None or start < best[0]):
                best = start, stop
        return best

    def _partial(self, region: str) -> int:
        """Length of the longest end of `region` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            start = region.find(stop[0], max(0, len(region) - len(stop) + 1))
            while start >= 0 and len(region) - start > longest:
                if stop.startswith(region[start:]):
                    longest = len(region) - start
                start = region.find(stop[0], start + 1)
        return longest
