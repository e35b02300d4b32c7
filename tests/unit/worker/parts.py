"""Builders and fakes for the worker's parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import redis

from engine.request import ChoiceDelta, LogprobEntry, RequestUsage, StepOutput
from shared.errors import ProtocolError
from shared.jobs import Owned, Publication, Publish
from shared.keys import JobId
from shared.protocol import Envelope, Frame, JobClass, decode
from shared.sampling import SamplingParams
from worker.job import HeldJob, Progress
from worker.outbox import weight
from worker.transcript import Transcript


def held(
    *,
    n: int = 1,
    last_seq: int = 0,
    job_class: JobClass = "normal",
    flush_ms: int = 0,
    max_tokens: int = 8,
    epoch: int = 1,
    job_id: str | None = None,
    prompt: int = 3,
    prompt_logprobs: int | None = None,
) -> HeldJob:
    """A pulled job."""
    envelope = Envelope(
        id=job_id or str(JobId.new("pool", 0)),
        model="pool",
        prompt_token_ids=list(range(1, prompt + 1)),
        sampling=SamplingParams(n=n, max_tokens=max_tokens, seed=1, ignore_eos=True, prompt_logprobs=prompt_logprobs),
        job_class=job_class,
        flush_ms=flush_ms,
    )
    return HeldJob(envelope, epoch, 1, last_seq, 2**50, 5.0, Transcript.of(envelope))


def progress(
    job: HeldJob,
    *deltas: ChoiceDelta,
    prompt: Sequence[LogprobEntry] = (),
    started: bool = False,
    status: str | None = None,
) -> Progress:
    """What a step did."""
    output = StepOutput(
        job.id,
        list(deltas),
        list(prompt),
        started=started,
        finished=status is not None,
        usage=RequestUsage(3, sum(len(d.token_ids) for d in deltas)),
        blocks=2,
        preemptions=1,
    )
    message = Progress(job, output, 10.0, 10.5, status)  # type: ignore[arg-type]
    message.weight = weight(output)
    return message


def delta(index: int, offset: int, *ids: int, text: str = "", finish: str | None = None) -> ChoiceDelta:
    """Tokens of one choice."""
    return ChoiceDelta(index, offset, list(ids), text, finish_reason=finish)  # type: ignore[arg-type]


class FakeStore:
    """Accepts as the scripts do: by sequence number, by epoch. `script` may raise or answer instead, once per call."""

    def __init__(self) -> None:
        self.frames: dict[str, list[Frame]] = {}
        self.endings: dict[str, str] = {}
        self.released: list[str] = []
        self.buried: list[str] = []
        self.too_broken = False
        self.release_away = 0
        self.calls: list[list[Publish]] = []
        self.script: list[Callable[[Sequence[Publish]], list[Publication] | None]] = []
        self.called = threading.Condition()

    def publish(self, items: Sequence[Publish]) -> list[Publication]:
        with self.called:
            self.calls.append(list(items))
            self.called.notify_all()
        if self.script and (answer := self.script.pop(0)(items)) is not None:
            return answer
        for item in items:
            log = self.frames.setdefault(item.job_id, [])
            assert item.first_seq <= len(log) + 1, "a gap"
            for number, data in enumerate(item.frames, item.first_seq):
                frame = decode(data, Frame)
                assert frame.seq == number
                if number > len(log):
                    log.append(frame)
            if item.ending is not None:
                self.endings[item.job_id] = item.ending.status
        return [Publication.FINE] * len(items)

    def release(self, owner: str, job: Owned) -> bool:
        if self.release_away:
            self.release_away -= 1
            raise redis.ConnectionError("away")
        self.released.append(job.job_id)
        return True

    def bury(self, owner: str, job: Owned, error: ProtocolError) -> bool:
        self.buried.append(job.job_id)
        if self.too_broken:
            raise error
        return True

    def renew(self, owner: str, jobs: Sequence[Owned]) -> list[Publication]:
        return [Publication.FINE] * len(jobs)

    def wait_calls(self, count: int) -> None:
        """Wait until `publish` was called so often."""
        with self.called:
            assert self.called.wait_for(lambda: len(self.calls) >= count, 20)


def away(items: Sequence[Publish]) -> None:
    """Redis does not answer."""
    raise redis.ConnectionError("away")
