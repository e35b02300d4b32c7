"""Which classes a pass serves: a backlog of the class `batch` is not to slow those who wait for words."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import PRIORITIES
from engine.sequence import Sequence

BATCH = PRIORITIES["batch"]

#: Passes in a row that may leave lower classes out while a prompt of a higher one is computed. Most prompts take one or
#: two; where prompts come without end, lower classes still have every fourth pass.
_PROMPTS = 3
#: The same while higher classes only decode: by turns with the batch, whose passes are many times as long, so that it
#: loses little by the short ones between them.
_DECODES = 1


@dataclass(frozen=True, slots=True)
class Served:
    """The lowest classes that a pass has rows of, as largest priorities: of prompts and of decodes."""

    prompts: int = sys.maxsize
    decodes: int = sys.maxsize

    def has(self, sequence: Sequence) -> bool:
        """Whether a running or admitted sequence has rows in the pass."""
        return sequence.priority <= (self.prompts if sequence.remaining > 1 else self.decodes)


EVERYONE = Served()


class Turns:
    """Leaves lower classes out of passes, but never for long."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def served(self, running: Iterable[Sequence]) -> Served:
        """Whom the next pass is for, by what runs.

        A prompt lets no prompt of a lower class into its passes, and no decode of a batch. Decodes of other classes
        stay, as their clients see each gap.
        """
        watched = [sequence for sequence in running if is_watched(sequence)]
        prompts = [sequence.priority for sequence in watched if sequence.remaining > 1]
        if not watched or self._in_a_row >= (_PROMPTS if prompts else _DECODES):
            return EVERYONE
        return Served(min(prompts, default=BATCH - 1), BATCH - 1)

    def took(self, served: Served) -> None:
        """A pass was planned."""
        # Counted also where nobody was left out: those who wait for admission would not show.
        self._in_a_row = 0 if served is EVERYONE else self._in_a_row + 1


def is_watched(sequence: Sequence) -> bool:
    """Whether somebody waits for what the next pass gives it."""
    return sequence.priority < BATCH and not (sequence.ahead and sequence.ends)
