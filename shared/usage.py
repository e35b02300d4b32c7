"""What keys have used, by day and model: counted by the scripts that end jobs, lane by lane, and summed up here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import structlog

from shared import keys, readings
from shared.errors import ForeignDataError, InvalidRequestError, ProtocolError
from shared.jobstore import JobStore
from shared.scripts import Call

log = structlog.get_logger(__name__)

#: Most days of one question.
MAX_DAYS: Final = 31
#: Commands that are sent at once, so that none of these questions holds Redis up for long.
_PAGE: Final = 500
_EPOCH: Final = date(1970, 1, 1)
#: Names of counters in Redis, in the order of the fields below.
_COUNTERS: Final = {b"requests": 0, b"prompt": 1, b"cached": 2, b"completion": 3}


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Of the jobs of one key and model that ended on one day (UTC). Cached tokens are among those of the prompts.

    Attributes:
        key: id of the API key; empty for jobs that came without one.
        requests: jobs that ended, however they did.
    """

    day: date
    tenant: str
    key: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def parse_day(text: str, param: str) -> date:
    """A day as `2026-01-31`. Raises InvalidRequestError."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError:
        raise InvalidRequestError(f"{param}: must be a day such as 2026-01-31", param=param) from None


def days_of(first: date, last: date) -> list[date]:
    """Every day from the first to the last.

    Raises:
        InvalidRequestError: the last is before the first, or there are more than `MAX_DAYS`.
    """
    count = (last - first).days + 1
    if not 1 <= count <= MAX_DAYS:
        raise InvalidRequestError(f"end: must be on {first} or up to {MAX_DAYS - 1} days later", param="end")
    return [first + timedelta(days=n) for n in range(count)]


class UsageStore(JobStore):
    """A job store with the question for usage."""

    async def today(self) -> date:
        """The day of Redis's clock, UTC."""
        return datetime.fromtimestamp(await self.now_ms() / 1e3, UTC).date()

    async def usage(self, days: Sequence[date], tenant: str | None = None) -> list[UsageRow]:
        """What was used on some days, of one tenant or of all; sorted.

        Raises:
            ServiceUnavailableError: Redis is away, or one of its nodes: a sum without its lanes would be too low.
        """
        places = [
            (pool, lane, day) for pool in await self.pools() for lane in range(await self._lanes(pool)) for day in days
        ]
        if tenant is None:
            found = await self._all(
                [_plain("SMEMBERS", keys.usage_tenants(p, n, _number(day))) for p, n, day in places]
            )
            hashes = [
                (*place, name.decode()) for place, names in zip(places, found, strict=True) for name in names or ()
            ]
        else:
            hashes = [(*place, tenant) for place in places]
        held = await self._all([_plain("HGETALL", keys.usage(p, n, _number(day), name)) for p, n, day, name in hashes])
        sums: dict[tuple[date, str, str, str], list[int]] = {}
        for (_, _, day, name), counters in zip(hashes, held, strict=True):
            for key, model, counter, value in _counters(counters or {}):
                sums.setdefault((day, name, key, model), [0, 0, 0, 0])[counter] += value
        return [UsageRow(*place, *sums[place]) for place in sorted(sums)]

    async def _lanes(self, pool: str) -> int:
        try:
            card = await self.get_card(pool)
        except ProtocolError:  # of another version, or broken: its lanes may be any
            return keys.MAX_LANES
        return keys.MAX_LANES if card is None else card.lanes

    async def _all(self, calls: Sequence[Call]) -> list[Any]:
        """One answer per call; None where something else is in the place of what was asked for."""
        answers: list[Any] = []
        for start in range(0, len(calls), _PAGE):
            for answer in await self._run_all(calls[start : start + _PAGE]):
                if isinstance(answer, ForeignDataError):
                    log.warning("usage.foreign_data", error=answer.message)
                    answers.append(None)
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    answers.append(answer)
        return answers


def _plain(command: str, key: str) -> Call:
    return Call((command, key), key)


def _number(day: date) -> int:
    return (day - _EPOCH).days


def _counters(held: Mapping[bytes, bytes]) -> Iterator[tuple[str, str, int, int]]:
    """Key, model, which counter and its value, of `<key>|<model>|<counter>` and numbers; anything else is left out."""
    for field, text in held.items():
        account, _, name = field.rpartition(b"|")
        key, _, model = account.partition(b"|")
        counter = _COUNTERS.get(name)
        if counter is None:
            continue
        try:
            value = readings.parse_number(text)
        except ForeignDataError as error:
            log.warning("usage.foreign_data", error=error.message)
            continue
        yield key.decode(errors="replace"), model.decode(errors="replace"), counter, value
