"""A log read back is the transcript to go on from."""

from __future__ import annotations

import pytest

from engine.request import ResumedChoice
from shared.errors import ProtocolError
from shared.protocol import WIRE_VERSION, ChoiceFrame, Frame, FrameKind, TokenLogprob, encode
from tests.unit.worker.parts import held
from worker import resume
from worker.job import HeldJob


class Log:
    def __init__(self, *frames: Frame) -> None:
        self.frames = frames

    async def read_log(self, job_id: str, after_seq: int = 0, count: int = 1000) -> list[bytes]:
        return [encode(f) for f in self.frames if f.seq > after_seq][:count]


def frame(seq: int, *choices: ChoiceFrame, kind: FrameKind = "tokens", prompt: list[int] | None = None) -> Frame:
    entries = [TokenLogprob(id=token, logprob=-0.5, rank=1) for token in prompt or []]
    return Frame(v=WIRE_VERSION, seq=seq, epoch=1, kind=kind, choices=list(choices), prompt_logprobs=entries)


async def read(job: HeldJob, *frames: Frame) -> HeldJob:
    job.last_seq = len(frames)
    await resume.read_back(Log(*frames), job)  # type: ignore[arg-type]
    return job


async def test_choices_text_logprobs_and_finish_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_PAGE", 2)
    entry = TokenLogprob(id=1, logprob=-0.5, rank=1)
    job = await read(
        held(n=3),
        frame(1, kind="started"),
        frame(2, ChoiceFrame(index=0, ids=[1], text="a", logprobs=[entry])),
        frame(3, ChoiceFrame(index=1, ids=[7, 8], text=""), ChoiceFrame(index=0, offset=1, ids=[2], logprobs=[entry])),
        frame(4, ChoiceFrame(index=0, offset=2, text="b", finish="stop", stop="zz")),
    )
    assert job.resumed == [ResumedChoice(0, [1, 2], "ab", "stop"), ResumedChoice(1, [7, 8], "", None)]
    assert job.transcript.completion_tokens == 4 and not job.transcript.complete
    assert job.request().resume == job.resumed


async def test_reading_twice_is_harmless() -> None:
    job = held()
    for _ in range(2):
        await read(job, frame(1, ChoiceFrame(ids=[1], text="a", finish="length")))
    assert job.transcript.completion_tokens == 1 and job.transcript.complete and not job.transcript.aborted


async def test_log_probabilities_of_the_prompt_are_counted() -> None:
    job = await read(
        held(prompt=5, prompt_logprobs=0),
        frame(1, kind="started"),
        frame(2, prompt=[2, 3]),
        frame(3, prompt=[4]),
    )
    assert job.request().prompt_logprobs_done == 3 and job.request().resume == []
    await read(job, frame(1, prompt=[2, 3]), frame(2, ChoiceFrame(ids=[1]), prompt=[4, 5]))
    assert job.request().prompt_logprobs_done == 4 and job.request().resume == [ResumedChoice(0, [1], "", None)]


@pytest.mark.parametrize(
    ("asked", "frames"),
    [
        (None, [frame(1, prompt=[2])]),
        (0, [frame(1, prompt=[2, 3, 4])]),
        (0, [frame(1, prompt=[2]), frame(2, prompt=[3, 4])]),
        (0, [frame(1, prompt=[2]), frame(2, ChoiceFrame(ids=[1])), frame(3, prompt=[3])]),
    ],
)
async def test_log_probabilities_of_the_prompt_that_contradict_the_job(asked: int | None, frames: list[Frame]) -> None:
    with pytest.raises(ProtocolError, match="log probabilities of the prompt"):
        await read(held(prompt=3, prompt_logprobs=asked), *frames)


@pytest.mark.parametrize(
    "frames",
    [
        [frame(1, ChoiceFrame(ids=[1])), frame(3, ChoiceFrame(offset=1, ids=[2]))],
        [frame(1, ChoiceFrame(ids=[1])), frame(2, ChoiceFrame(offset=5, ids=[2]))],
        [frame(1, ChoiceFrame(index=9, ids=[1]))],
        [frame(1, ChoiceFrame(ids=[1], finish="stop")), frame(2, ChoiceFrame(offset=1, ids=[2]))],
    ],
)
async def test_a_log_with_a_hole_or_a_contradiction_is_refused(frames: list[Frame]) -> None:
    with pytest.raises(ProtocolError):
        await read(held(), *frames)


async def test_a_log_that_ends_early_is_refused() -> None:
    job = held(last_seq=5)
    with pytest.raises(ProtocolError, match="ends at frame 0"):
        await resume.read_back(Log(), job)  # type: ignore[arg-type]
