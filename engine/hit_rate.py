"""How much of the prompts the prefix cache has had."""

from __future__ import annotations

from collections import deque
from typing import Final

#: Requests that the rate looks back on, as in vLLM.
RECENT: Final = 1000


class HitRate:
    """Counts each sequence once, when it is first admitted.

    Attributes:
        queries: tokens looked up since the start.
        hits: those of them that were found.
    """

    def __init__(self) -> None:
        self.queries = self.hits = 0
        self._recent: deque[tuple[int, int]] = deque()
        self._recent_queries = self._recent_hits = 0

    def add(self, queries: int, hits: int) -> None:
        """Count one sequence."""
        self.queries += queries
        self.hits += hits
        self._recent.append((queries, hits))
        self._recent_queries += queries
        self._recent_hits += hits
        if len(self._recent) > RECENT:
            old_queries, old_hits = self._recent.popleft()
            self._recent_queries -= old_queries
            self._recent_hits -= old_hits

    @property
    def recent(self) -> float:
        """Hits over queries of the most recent sequences, 0 to 1."""
        return self._recent_hits / self._recent_queries if self._recent_queries else 0.0
