"""A job in this worker's hands, and what its threads tell each other about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from engine.request import PRIORITIES, EngineRequest, ResumedChoice, StepOutput
from shared.errors import InvalidRequestError, RopewayError
from shared.jobs import Owned, PulledJob
from shared.lora.files import IDENTITY_PATTERN
from shared.protocol import Envelope, ErrorInfo, JobStatus
from shared.trace_context import NO_TRACE, Trace, trace_id
from worker.transcript import Transcript


class Stage(Enum):
    """Where a job is in the worker. Only the engine's thread moves it."""

    TAKEN = "taken"  # pulled, not yet given to the engine
    RUNNING = "running"
    OVER = "over"  # ended, dropped or handed back; nothing more comes from the engine


class Cause(Enum):
    """Why a job is to stop before its engine has finished it."""

    CANCELLED = "cancelled"
    FENCED = "fenced"
    EXPIRED = "expired"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class HeldJob:
    """One taking of a job: the same job under a later epoch is another object.

    Attributes:
        epoch: the fence; goes with every publish, renew and release.
        last_seq: frames that were in its log when it was pulled.
        deadline_ms: of Redis's clock.
        queue_ms: from submit to the pull.
        transcript: what is published of it; the publisher's from the moment that the engine has the job.
        suspect: two workers died while they held this job.
        alone: nothing else may be pulled while it is here.
        resumed: choices for the engine to go on from.
        prompt_logprobs_done: log probabilities of the prompt that are published.
        cause: asked for before the engine had the job.
        failure: why it cannot even be given to the engine.
        pulled_at, pulled_ns: monotonic seconds, and Unix nanoseconds of this machine's clock.
        over_at: likewise, of when it left this worker; 0 as long as it has not.
        lost_by, since_ms: see `PulledJob`.
        taken_tokens: of the answer, that others had published.
        trace: what spans of this taking are children of.
    """

    envelope: Envelope
    epoch: int
    attempts: int
    last_seq: int
    deadline_ms: int
    queue_ms: float
    transcript: Transcript
    suspect: bool = False
    alone: bool = False
    resumed: list[ResumedChoice] = field(default_factory=list)
    prompt_logprobs_done: int = 0
    stage: Stage = Stage.TAKEN
    cause: Cause | None = None
    failure: RopewayError | None = None
    pulled_at: float = field(default_factory=time.monotonic)
    pulled_ns: int = field(default_factory=time.time_ns)
    over_at: float = 0.0
    lost_by: str = ""
    since_ms: float = 0.0
    taken_tokens: int = 0
    trace: Trace = field(default_factory=lambda: NO_TRACE)

    @classmethod
    def of(cls, pulled: PulledJob) -> HeldJob:
        """A job as `pull` answered it."""
        return cls(
            envelope=pulled.envelope,
            epoch=pulled.epoch,
            attempts=pulled.attempts,
            last_seq=pulled.last_seq,
            deadline_ms=pulled.deadline_ms,
            queue_ms=pulled.queue_ms,
            transcript=Transcript.of(pulled.envelope),
            suspect=pulled.suspect,
            alone=pulled.alone,
            lost_by=pulled.lost_by,
            since_ms=pulled.since_ms,
            trace=pulled.envelope.trace,
        )

    @property
    def id(self) -> str:
        return self.envelope.id

    def unix_ns(self, at: float) -> int:
        """Monotonic seconds as Unix nanoseconds; whatever is done to the clock, times of one job fit together."""
        return self.pulled_ns + round((at - self.pulled_at) * 1e9)

    @property
    def named(self) -> dict[str, str]:
        """What a line of the log calls it."""
        trace = trace_id(self.trace)
        return {"job_id": self.id} if trace is None else {"job_id": self.id, "trace_id": trace}

    @property
    def owned(self) -> Owned:
        """As `renew` and `release` want it."""
        return Owned(self.id, self.epoch)

    def request(self) -> EngineRequest:
        """The job as the engine takes it.

        Raises:
            InvalidRequestError: it names an adapter and does not say which content: it is never the base model's.
        """
        envelope, identity = self.envelope, self.envelope.adapter_identity
        adapted = envelope.adapter is not None or identity is not None
        if adapted and (identity is None or IDENTITY_PATTERN.fullmatch(identity) is None):
            raise InvalidRequestError("adapter: the job does not say which content it is to use", param="adapter")
        return EngineRequest(
            id=envelope.id,
            prompt_token_ids=envelope.prompt_token_ids,
            params=envelope.sampling,
            priority=PRIORITIES[envelope.job_class],
            adapter=identity,
            adapter_name=envelope.adapter or "",
            cache_salt=envelope.cache_salt,
            resume=self.resumed,
            prompt_logprobs_done=self.prompt_logprobs_done,
        )


@dataclass(slots=True)
class Progress:
    """Engine's thread to publisher: what one step did for a job.

    Attributes:
        began, ended: monotonic seconds of the step.
        status: final status where `output.finished`.
        error: with status `failed` or `expired`.
        weight: about how many bytes it takes until it is accepted.
    """

    job: HeldJob
    output: StepOutput
    began: float
    ended: float
    status: JobStatus | None = None
    error: ErrorInfo | None = None
    weight: int = 0


@dataclass(slots=True)
class Handover:
    """Engine's thread to publisher: send what there is of a job, then give it back to the queue."""

    job: HeldJob


@dataclass(slots=True)
class Drop:
    """To the publisher: the job is another's; send nothing more of it."""

    job: HeldJob


@dataclass(slots=True)
class Admit:
    """To the engine's thread: a pulled job."""

    job: HeldJob


@dataclass(slots=True)
class Keep:
    """To the engine's thread: adapters to keep in memory, names by identity, and those that no name stands for."""

    pinned: Mapping[str, str]
    retired: frozenset[str]


@dataclass(slots=True)
class End:
    """To the engine's thread: stop a job."""

    job: HeldJob
    cause: Cause
