"""Plain types that the job store's calls take and give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from shared.protocol import Envelope, ErrorInfo, Head, JobClass, JobStatus, Usage


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Exact limits of one lane; None is no limit. Reached, `submit` refuses."""

    max_queued_jobs: int | None = 10_000
    max_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Seconds. A job's keys expire at deadline + longest run + retention; after its end at retention.

    Attributes:
        deadline_s: from when the job may start until it must have ended.
        max_run_s: the longest that a job may run past its deadline before its keys may vanish.
        retention_s: how long result and events stay after the end.
        delay_s: until the job may start; its deadline counts from then.
    """

    deadline_s: float = 3600.0
    max_run_s: float = 600.0
    retention_s: float = 3600.0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaWait:
    """A job counts as submitted once so many replicas have it; after `timeout_ms` it is refused."""

    replicas: int
    timeout_ms: int = 1000


@dataclass(frozen=True, slots=True)
class Submitted:
    """Answer of `submit`. `duplicate`: the id was known, nothing was changed."""

    duplicate: bool
    queued_jobs: int
    queued_tokens: int


@dataclass(frozen=True, slots=True)
class PullBudget:
    """What a worker can admit now, per class, and the largest job it could ever hold.

    A job taken in one class is charged to that class and to all below it.

    Attributes:
        sequences, tokens: by class name.
        max_job_tokens: jobs of a higher cost are left for another worker.
        idle: the caller holds no job at all, in no lane. Only then it may be given a job that has to run alone, and
            one job whatever number of sequences it has.
        suspects: how many more jobs it may take that two workers died with; keep it small, so that a job that kills its
            workers makes few others look like it.
        adapters: identities of those that the caller has jobs of.
        more_adapters: of how many others it may have jobs too; None for any. One of a job that has waited for half
            a second is let in beyond that, as are those of jobs that another worker has begun.
    """

    sequences: Mapping[str, int]
    tokens: Mapping[str, int]
    max_job_tokens: int
    idle: bool = False
    suspects: int = 4
    adapters: frozenset[str] = frozenset()
    more_adapters: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Ownership's numbers. `reclaim` False: take nothing from others (one lease after one's own reconnect)."""

    lease_ms: int = 15_000
    max_attempts: int = 3
    reclaim: bool = True
    charge: bool = True


@dataclass(frozen=True, slots=True)
class PulledJob:
    """A job that is now the caller's.

    Attributes:
        envelope: decoded; a job whose bytes do not decode is buried by the store and never gets here.
        epoch: the fence; goes with every publish, renew and release.
        attempts: charged tries, this one included.
        last_seq: sequence number of the last frame in its log; 0 for none.
        deadline_ms: Unix milliseconds of Redis's clock.
        queue_ms: from submit to this pull.
        suspect: two workers died while they held this job.
        alone: it has to run alone: pull nothing, from no lane, until it has ended.
        lost_by: the owner that let its lease run out, where the job was taken over; else empty.
        since_ms: since that owner took it; else since it was queued, or put back.
    """

    envelope: Envelope
    epoch: int
    attempts: int
    last_seq: int
    deadline_ms: int
    queue_ms: float
    suspect: bool
    alone: bool = False
    lost_by: str = ""
    since_ms: float = 0.0


@dataclass(slots=True)
class Pulled:
    """Answer of `pull`: jobs taken, and ids of those that ended there instead.

    Attributes:
        ended: expired, cancelled and buried ones, with their final status.
        buried: those of `ended` that are dead letters now.
        reclaimed: how many of `jobs` were taken from an owner that let its lease run out.
        alone_waiting: jobs of this lane that wait for an idle worker, because they have to run alone.
    """

    jobs: list[PulledJob] = field(default_factory=list)
    ended: dict[str, JobStatus] = field(default_factory=dict)
    buried: list[str] = field(default_factory=list)
    reclaimed: int = 0
    alone_waiting: int = 0


class Publication(Enum):
    """Answer of `publish` and `renew` for one job."""

    FINE = "fine"
    #: Accepted, but somebody asked for the job's end: abort it and publish its last frame.
    CANCELLED = "cancelled"
    #: Another owner or epoch has the job, or it has ended: drop it, publish nothing more.
    FENCED = "fenced"
    #: What Redis holds of the job is not what was written there; trying again is of no use.
    BROKEN = "broken"
    #: The node that has the job is away, while others answer: nothing is known, ask again.
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class Ending:
    """What the last frame stores: final status, encoded `Result`, and its usage; None: whatever the result says."""

    status: JobStatus
    result: bytes
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """Frames of one job for one pipeline.

    Attributes:
        first_seq: of the first frame; they are consecutive.
        frames: encoded `Frame`s.
        ending: with the last frame of the job.
    """

    job_id: str
    owner: str
    epoch: int
    first_seq: int
    frames: list[bytes]
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Owned:
    """A job as its owner holds it."""

    job_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as anyone may see it. Times are Unix milliseconds of Redis's clock; 0 where not yet.

    `result` is the encoded `Result` of an ended job, `attachment` what its submitter keeps with it, `start_ms` when a
    job with a delay may start, `tenant` whose it is.
    """

    id: str
    status: JobStatus
    envelope: Envelope
    epoch: int
    attempts: int
    last_seq: int
    cancel_requested: bool
    submitted_ms: int
    started_ms: int
    finished_ms: int
    deadline_ms: int
    start_ms: int = 0
    tenant: str = ""
    result: bytes | None = None
    attachment: bytes | None = None


@dataclass(frozen=True, slots=True)
class JobEntry:
    """A job as lists show it; times as in `JobView`."""

    id: str
    status: JobStatus
    job_class: JobClass
    head: Head
    attempts: int
    last_seq: int
    cancel_requested: bool
    submitted_ms: int
    started_ms: int
    finished_ms: int
    deadline_ms: int
    start_ms: int


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """Exact counters of one lane. What has ended is counted for as long as the lane's counters are there."""

    queued_jobs: int = 0
    queued_tokens: int = 0
    running_jobs: int = 0
    running_tokens: int = 0
    ended_jobs: int = 0
    ended_tokens: int = 0
    delayed_jobs: int = 0
    delayed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A buried job, for an operator. `envelope` as it was submitted, encoded."""

    entry: str
    job_id: str
    reason: str
    attempts: int
    error: ErrorInfo | None = None
    envelope: bytes = b""

    @property
    def buried_ms(self) -> int:
        """Unix milliseconds of Redis's clock."""
        return int(self.entry.partition("-")[0])


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Of each tenant, per minute; None is no limit."""

    requests: int | None = None
    tokens: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is anything to count."""
        return self.requests is not None or self.tokens is not None


@dataclass(frozen=True, slots=True)
class QueuedLimits:
    """What a tenant may have queued at once, over all lanes of all pools; None is no limit."""

    jobs: int | None = None
    tokens: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is anything to count."""
        return self.jobs is not None or self.tokens is not None


@dataclass(frozen=True, slots=True)
class QueuedCount:
    """Answer of `Tenants.enter`: what counts as queued; with `allowed`, what was asked for is among it."""

    allowed: bool
    jobs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Answer of `Tenants.spend`.

    Attributes:
        allowed: whether it was taken; else nothing was.
        requests_left, tokens_left: None without a limit.
        wait_s: until it may be asked again; None if it is more than the limit itself and never will be.
    """

    allowed: bool
    requests_left: int | None
    tokens_left: int | None
    wait_s: float | None
