"""What Redis says of a name, remembered for seconds; for longer while Redis is away, so that who is known goes on."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import structlog

from shared.errors import ServiceUnavailableError

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Names that are remembered; beyond it those go that were not asked for longest.
MOST: Final = 10_000
#: Seconds that a request waits for Redis where an older answer may do.
PATIENCE_S: Final = 1.0
#: Seconds after an answer that did not come in which older ones do at once: not every request waits.
PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    asked_at: float


class Lookups(Generic[T]):
    """Remembers the answers to one kind of question. Only what was found is: a flood of other names costs no memory.

    Args:
        ask: what Redis says of a name; None: there is nothing. Raises ServiceUnavailableError.
        fresh_s: seconds that an answer holds.
        outage_s: seconds that it holds while Redis does not answer.
    """

    def __init__(self, ask: Callable[[str], Awaitable[T | None]], *, fresh_s: float, outage_s: float) -> None:
        self._ask, self._fresh_s, self._outage_s = ask, fresh_s, max(fresh_s, outage_s)
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[T | None]] = {}
        self._changes = 0
        self._doubted_at = self._paused_until = float("-inf")

    async def find(self, name: str) -> T | None:
        """What Redis says of a name, or said not long ago.

        Raises:
            ServiceUnavailableError: Redis does not answer, and nothing was heard of the name, or too long ago.
        """
        now, entry = time.monotonic(), self._entries.get(name)
        if entry is None or now - entry.asked_at >= self._outage_s:
            return await asyncio.shield(self._question(name))
        self._entries.move_to_end(name)
        fresh = now - entry.asked_at < self._fresh_s and entry.asked_at > self._doubted_at
        if fresh or now < self._paused_until:
            return entry.value
        question = self._question(name)
        await asyncio.wait({question}, timeout=PATIENCE_S)
        if question.done() and not isinstance(question.exception(), ServiceUnavailableError):
            return question.result()
        if self._entries.get(name) is not entry:  # it was forgotten meanwhile
            return await self.find(name)
        self._paused_until = time.monotonic() + PAUSE_S
        log.warning("lookup.stale", seconds=round(time.monotonic() - entry.asked_at, 1))
        return entry.value

    def forget(self, name: str) -> None:
        """It has changed: neither what is remembered holds any more, nor an answer that is on its way."""
        self._changes += 1
        self._entries.pop(name, None)

    def doubt(self) -> None:
        """Changes may not have been heard of: ask anew for every name."""
        self._changes += 1
        self._doubted_at = time.monotonic()

    def _question(self, name: str) -> asyncio.Task[T | None]:
        """The question that is under way: all that wait share one, and none of them breaks it off."""
        question = self._asking.get(name)
        if question is None:
            question = self._asking[name] = asyncio.create_task(self._answer(name))
            question.add_done_callback(lambda done: self._answered(name, done))
        return question

    def _answered(self, name: str, question: asyncio.Task[T | None]) -> None:
        del self._asking[name]
        if not question.cancelled():
            question.exception()  # whoever waits has it

    async def _answer(self, name: str) -> T | None:
        changes = None
        while changes != self._changes:  # an answer may be older than a change that was heard of meanwhile
            changes, asked_at = self._changes, time.monotonic()
            value = await self._ask(name)
        self._entries.pop(name, None)
        if value is not None:
            self._entries[name] = _Entry(value, asked_at)
            if len(self._entries) > MOST:
                self._entries.popitem(last=False)
        return value
