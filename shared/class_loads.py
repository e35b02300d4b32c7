"""How much of each class is queued and running, from the exact counters of lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from shared.jobs import LaneLoad
from shared.keys import BUCKETS, CLASSES
from shared.readings import parse_number

_COUNTERS: Final = ("queued_jobs", "queued_tokens", "running_jobs", "running_tokens")
_PLACES: Final = tuple((c, counter, b) for c in CLASSES for counter in _COUNTERS for b in range(BUCKETS))

#: Fields of a lane's stats that `summed` reads.
FIELDS: Final = tuple(f"{counter}:{job_class}:{bucket}" for job_class, counter, bucket in _PLACES)


def summed(lanes: Iterable[Sequence[bytes | None]]) -> dict[str, LaneLoad]:
    """Values of `FIELDS`, summed over lanes and buckets, by class. What has ended is not counted by class.

    Raises:
        ForeignDataError: one of them is no number.
    """
    sums = {job_class: dict.fromkeys(_COUNTERS, 0) for job_class in CLASSES}
    for values in lanes:
        for (job_class, counter, _), value in zip(_PLACES, values, strict=True):
            sums[job_class][counter] += parse_number(value)
    return {job_class: LaneLoad(**counters) for job_class, counters in sums.items()}
