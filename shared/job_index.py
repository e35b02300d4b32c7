"""Jobs of a tenant in the order of their ids, which is that of their submits: from the index that `submit` keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from shared import keys, readings
from shared.errors import ProtocolError
from shared.jobs import JobEntry
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.scripts import Call

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Span:
    """Which jobs are asked for, by the last part of their ids: exclusive bounds, empty for none.

    A bound may be shorter than an id's part: 12 hex digits are a time in milliseconds.
    """

    above: str = ""
    below: str = ""
    ascending: bool = False

    def behind(self, unique: str) -> Span:
        """What comes after a job."""
        if self.ascending:
            return Span(above=max(unique, self.above), below=self.below, ascending=True)
        return Span(above=self.above, below=min(unique, self.below or unique))


class JobIndex(JobStore):
    """A job store with the calls that list jobs."""

    async def ids(self, tenant: str, lanes: Sequence[tuple[str, int]], span: Span, count: int) -> list[JobId]:
        """The first `count` jobs of a tenant within a span, over some lanes, given as pool and number.

        One round trip, with `count` ids at most from each lane. Jobs that have expired may be among them.
        """
        bounds = f"({span.above}" if span.above else "-", f"({span.below}" if span.below else "+"
        how = ("BYLEX",) if span.ascending else ("BYLEX", "REV")
        calls = [
            _plain("ZRANGE", keys.tenant_jobs(pool, lane, tenant), *_turned(bounds, span), *how, "LIMIT", 0, count)
            for pool, lane in lanes
        ]
        answers = await self._run_all(calls)
        found = []
        for (pool, lane), members in zip(lanes, answers, strict=True):
            if isinstance(members, Exception):
                raise members
            ids = (JobId.match(f"{pool}.{lane}.{member.decode(errors='replace')}") for member in members)
            found += [job_id for job_id in ids if job_id is not None]
        found.sort(key=lambda job_id: job_id.unique, reverse=not span.ascending)
        return found[:count]

    async def entries(self, ids: Sequence[JobId]) -> list[JobEntry]:
        """Those of some jobs that are there. One that does not read is left out: it must not hide the others."""
        calls = [_plain("HMGET", keys.job(job_id), *readings.ENTRY_FIELDS) for job_id in ids]
        entries = []
        for job_id, values in zip(ids, await self._run_all(calls) if calls else [], strict=True):
            if isinstance(values, Exception):
                raise values
            if values[0] is None or values[1] is None:
                continue
            try:
                entries.append(readings.parse_entry(str(job_id), values))
            except ProtocolError as error:
                log.warning("a job does not read", job_id=str(job_id), error=error.message)
        return entries


def _turned(bounds: tuple[str, str], span: Span) -> tuple[str, str]:
    return bounds if span.ascending else (bounds[1], bounds[0])


def _plain(command: str, key: str, *arguments: Any) -> Call:
    return Call((command, key, *arguments), key)
