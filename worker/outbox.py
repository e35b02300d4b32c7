"""Frames of one job on their way to Redis: gathered, numbered, kept until they are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.request import ChoiceDelta, LogprobEntry, RequestUsage, StepOutput
from shared.errors import ProtocolError
from shared.jobs import Ending, Publish
from shared.protocol import (
    WIRE_VERSION,
    ChoiceFrame,
    ErrorInfo,
    Frame,
    FrameKind,
    JobStatus,
    Timings,
    TokenLogprob,
    Usage,
    encode,
)
from worker.job import HeldJob, Progress
from worker.request_metrics import Asked
from worker.transcript import wire_logprob

#: Bytes, roughly, above which what was gathered becomes a frame of its own.
_FRAME_BYTES = 512 * 1024
#: Bytes of one job's frames above which the rest waits for the next pipeline.
_SEND_BYTES = 1024 * 1024
_TOKEN_BYTES = 12
#: Of one candidate, without the bytes of its token.
_LOGPROB_BYTES = 64


def weight(output: StepOutput) -> int:
    """About how many bytes an output takes until it is accepted."""
    return 128 + sum(_delta_weight(delta) for delta in output.choices) + _logprobs_weight(output.prompt_logprobs)


def _delta_weight(delta: ChoiceDelta) -> int:
    return 64 + _TOKEN_BYTES * len(delta.token_ids) + 4 * len(delta.text) + _logprobs_weight(delta.logprobs or ())


def _logprobs_weight(entries: Iterable[LogprobEntry]) -> int:
    return _LOGPROB_BYTES * sum(1 + len(entry.top) for entry in entries)


@dataclass(slots=True)
class Outbox:
    """One job's frames. The publisher's alone.

    A frame is numbered and encoded once, when it is about to be sent. From then on it is sent again as it is until it
    is accepted, so a repeat is recognised by its number.

    Attributes:
        due: monotonic seconds at which what is gathered must be sent; None if nothing is.
        weight: bytes that were put in and are not yet accepted.
        ending: set with the last frame.
        handover: give the job back once everything is sent.
        told: its cancel was passed on.
        put_offs: times in a row that its node was away.
        summary, asked: of the ended job, for metrics.
        interval: called with the seconds since a choice's tokens before, and with how many came now.
        began, first_token, last: monotonic seconds, None if not yet; `last` is the end of the newest step.
        preempted: monotonic seconds of the steps in which the job ran again, each with how often it had been preempted.
        failure: code of the error that it ended with.
    """

    job: HeldJob
    due: float | None = None
    weight: int = 0
    ending: Ending | None = None
    handover: bool = False
    told: bool = False
    put_offs: int = 0
    summary: tuple[Usage, Timings] = (Usage(), Timings())
    asked: Asked | None = None
    interval: Callable[[float, int], None] | None = None
    began: float | None = None
    first_token: float | None = None
    last: float | None = None
    preempted: list[tuple[float, int]] = field(default_factory=list)
    failure: str | None = None
    _seq: int = 0
    _frames: list[bytes] = field(default_factory=list)
    _taken: int = 0
    _started: bool = False
    _prompt: list[TokenLogprob] = field(default_factory=list)
    _gathered: dict[int, ChoiceFrame] = field(default_factory=dict)
    _gathered_weight: int = 0
    _token_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seq = self.job.last_seq

    def add(self, progress: Progress) -> None:
        """Gather what a step did; the last one builds the last frame."""
        output = progress.output
        if output.started:
            self.began = progress.began
            self._started = self._seq == 0  # a job that is taken up has said so already
        if self.first_token is None and any(delta.token_ids for delta in output.choices):
            self.first_token = progress.ended
        self.last = progress.ended
        if output.preemptions and output.preemptions > (self.preempted[-1][1] if self.preempted else 0):
            self.preempted.append((progress.began, output.preemptions))
        self._gather_prompt(output.prompt_logprobs)
        for delta in output.choices:
            if delta.token_ids and self.interval is not None:
                self._measure(delta, progress.ended)
            self._gather(delta)
        self.weight += progress.weight
        if output.finished:
            self.due = 0.0
            self._end(progress)
        elif self.due is None and (self._started or self._prompt or self._gathered or self._frames):
            self.due = time.monotonic() + self.job.envelope.flush_ms / 1e3

    def take(self, owner: str) -> Publish | None:
        """What is to be sent next, or None. The same again until `accepted` is called, and what came since.

        After an outage, or a step over a long prompt, not everything at once: Redis serves others too.
        """
        self._seal()
        if not self._frames:
            return None
        taken, size = 0, 0
        while taken < len(self._frames) and size < _SEND_BYTES:
            size += len(self._frames[taken])
            taken += 1
        self._taken = taken
        first = self._seq - len(self._frames) + 1
        ending = self.ending if taken == len(self._frames) else None
        return Publish(self.job.id, owner, self.job.epoch, first, self._frames[:taken], ending)

    def accepted(self) -> int:
        """What `take` answered last is in Redis. Answers about how many bytes wait no more."""
        del self._frames[: self._taken]
        self._taken = self.put_offs = 0
        if not self._frames:
            freed, self.due, self.weight = self.weight, None, 0
            return freed
        self.due = time.monotonic()
        freed = min(self.weight, _SEND_BYTES)
        self.weight -= freed
        return freed

    @property
    def empty(self) -> bool:
        """Everything that was put in is in Redis."""
        return not (self._frames or self._gathered or self._prompt or self._started)

    def _measure(self, delta: ChoiceDelta, now: float) -> None:
        """The interval before a choice's tokens; the first that come here have none."""
        before, tokens = self._token_at.get(delta.index), len(delta.token_ids)
        self._token_at[delta.index] = now
        if before is not None and self.interval is not None:
            self.interval((now - before) / tokens, tokens)

    def _gather_prompt(self, entries: Iterable[LogprobEntry]) -> None:
        """One step may bring thousands of them, each with its candidates: a frame is full in the middle of it."""
        for entry in entries:
            self._prompt.append(wire_logprob(entry))
            self._gathered_weight += _LOGPROB_BYTES * (1 + len(entry.top))
            self._gathered_weight += len(entry.token) + sum(len(token) for *_, token in entry.top)
            if self._gathered_weight > _FRAME_BYTES:
                self._seal()

    def _gather(self, delta: ChoiceDelta) -> None:
        logprobs = None if delta.logprobs is None else [wire_logprob(entry) for entry in delta.logprobs]
        frame = self._gathered.get(delta.index)
        if frame is None:
            self._gathered[delta.index] = ChoiceFrame(
                index=delta.index,
                offset=delta.offset,
                ids=list(delta.token_ids),
                text=delta.text,
                logprobs=logprobs,
                finish=delta.finish_reason,
                stop=delta.stop_reason,
            )
        else:
            frame.ids += delta.token_ids
            frame.text += delta.text
            if logprobs is not None:
                frame.logprobs = (frame.logprobs or []) + logprobs
            frame.finish, frame.stop = delta.finish_reason, delta.stop_reason
        self._gathered_weight += _delta_weight(delta)
        if self._gathered_weight > _FRAME_BYTES:
            self._seal()

    def _seal(self) -> None:
        """Make frames of what is gathered."""
        if self._started:
            self._append("started", [], [])
            self._started = False
        if self._prompt or self._gathered:
            choices = [self._gathered[index] for index in sorted(self._gathered)]
            self.job.transcript.add(choices, self._prompt)
            self._append("tokens", choices, self._prompt)
            self._prompt = []
            self._gathered.clear()
            self._gathered_weight = 0

    def _append(self, kind: FrameKind, choices: list[ChoiceFrame], prompt: list[TokenLogprob]) -> None:
        self._seq += 1
        frame = Frame(
            v=WIRE_VERSION, seq=self._seq, epoch=self.job.epoch, kind=kind, choices=choices, prompt_logprobs=prompt
        )
        self._frames.append(encode(frame))

    def _end(self, progress: Progress) -> None:
        """Build last frame and result."""
        self._seal()
        status: JobStatus = progress.status or "completed"
        usage, timings = _usage(progress.output.usage), self._timings(progress)
        self.summary = usage, timings
        envelope, transcript = self.job.envelope, self.job.transcript
        self.asked = Asked(envelope.sampling.max_tokens, transcript.finishes, transcript.longest, envelope.trace)
        result, error = self._encode_result(status, usage, timings, progress.error)
        status = "failed" if error is not progress.error else status
        self.failure = None if error is None else error.code or error.type
        self._seq += 1
        frame = Frame(
            v=WIRE_VERSION,
            seq=self._seq,
            epoch=self.job.epoch,
            kind="error" if error is not None else "done",
            status=status,
            usage=usage,
            timings=timings,
            error=error,
        )
        self._frames.append(encode(frame))
        self.ending = Ending(status, result, usage)

    def _encode_result(
        self, status: JobStatus, usage: Usage, timings: Timings, error: ErrorInfo | None
    ) -> tuple[bytes, ErrorInfo | None]:
        """The encoded result, and the error that it carries: a result over the wire's limit is itself one."""
        transcript, job_id = self.job.transcript, self.job.id
        try:
            return encode(transcript.result(job_id, status, usage, timings, error)), error
        except ProtocolError as too_large:
            error = ErrorInfo.of(too_large)
            transcript.clear()
            return encode(transcript.result(job_id, "failed", usage, timings, error)), error

    def _timings(self, progress: Progress) -> Timings:
        """Milliseconds. Queue time ends when the engine begins; the other two are counted from there."""
        job = self.job
        began = progress.ended if self.began is None else self.began
        first = progress.ended if self.first_token is None else self.first_token
        return Timings(
            queue_ms=job.queue_ms + (began - job.pulled_at) * 1e3,
            first_token_ms=(first - began) * 1e3,
            run_ms=(progress.ended - began) * 1e3,
            blocks=progress.output.blocks,
            preemptions=progress.output.preemptions,
        )


def _usage(usage: RequestUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
