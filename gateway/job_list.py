"""A page of a tenant's jobs: the newest first or last, filtered, at a bounded cost whatever there is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.catalogue import Pool
from shared.errors import InvalidRequestError
from shared.job_index import JobIndex, Span
from shared.jobs import JobEntry
from shared.keys import JobId
from shared.protocol import JobClass, JobStatus

#: Jobs that one page looks at; a filter that few of them pass gives a short page, and the next goes on behind it.
MAX_LOOKED_AT: Final = 1000
#: Jobs that are read at once.
_READ: Final = 100
#: What the 48 bits of milliseconds of an id can say.
_LATEST_S: Final = (2**48 - 1) / 1000
_CURSOR: Final = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class Filter:
    """What is asked for; None and empty ask for nothing."""

    statuses: frozenset[JobStatus] = frozenset()
    model: str | None = None
    job_class: JobClass | None = None

    def passes(self, entry: JobEntry) -> bool:
        """Whether it is one of those."""
        return (
            (not self.statuses or entry.status in self.statuses)
            and self.model in (None, entry.head.model)
            and self.job_class in (None, entry.job_class)
        )


@dataclass(frozen=True, slots=True)
class Page:
    """Jobs, and where the next page begins; None where there is nothing more."""

    entries: list[JobEntry]
    next: str | None


def span(after: str | None, created_after: float | None, created_before: float | None, ascending: bool) -> Span:
    """Where a page begins and ends. Times are Unix seconds, inclusive and exclusive.

    Raises:
        InvalidRequestError: `after` is neither a job's id nor a cursor.
    """
    whole = Span(
        above="" if created_after is None else _moment(created_after),
        below="" if created_before is None else _moment(created_before),
        ascending=ascending,
    )
    if after is None:
        return whole
    job_id = JobId.match(after)
    if job_id is None and not _CURSOR.match(after):
        raise InvalidRequestError("after: must be a job's id, or `next` of an earlier page", param="after")
    return whole.behind(after if job_id is None else job_id.unique)


async def page(index: JobIndex, tenant: str, pools: Sequence[Pool], wanted: Filter, where: Span, limit: int) -> Page:
    """A page of a tenant's jobs in some pools.

    Raises:
        ServiceUnavailableError: Redis is away, or a node of it.
    """
    lanes = [(pool.card.pool, lane) for pool in pools for lane in range(pool.card.lanes)]
    found: list[JobEntry] = []
    looked_at, read = 0, limit + 1 if wanted == Filter() else _READ
    while lanes:
        ids = await index.ids(tenant, lanes, where, read)
        for entry in await index.entries(ids):
            if not wanted.passes(entry):
                continue
            if len(found) == limit:
                return Page(found, JobId.parse(found[-1].id).unique)
            found.append(entry)
        if len(ids) < read:
            break
        where = where.behind(ids[-1].unique)
        looked_at += len(ids)
        if looked_at >= MAX_LOOKED_AT:
            return Page(found, ids[-1].unique)
    return Page(found, None)


def _moment(seconds: float) -> str:
    """The beginning of ids that were made from this moment on."""
    return f"{int(min(seconds, _LATEST_S) * 1000):012x}"
