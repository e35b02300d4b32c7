"""Says what is wrong with what clients saw. Knows nothing of how it came about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from shared.protocol import FINAL_STATUSES, ChoiceResult, Envelope, Frame, JobStatus, Result
from tests.support.chaos.witness import Arrival, Choice, Reading, Witness

#: `lost`: accepted, and not ended well. `gap`, `repeat`, `disorder`: in the numbers of frames or the offsets of tokens.
#: `fenced`: what the job's log does not hold, or an owner's that had lost it. `different`: from an undisturbed run.
Kind = Literal["lost", "gap", "repeat", "disorder", "fenced", "different"]
KINDS: Sequence[Kind] = ("lost", "gap", "repeat", "disorder", "fenced", "different")


#: Fields of a request that its envelope must say again.
_KEPT = ("max_tokens", "temperature", "seed", "n", "stop", "ignore_eos", "min_tokens", "presence_penalty")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that must not be."""

    kind: Kind
    job_id: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.job_id}: {self.what}"


@dataclass(slots=True)
class Evidence:
    """What Redis holds of a job after the run, and what an undisturbed run gives; None where there is nothing.

    Attributes:
        heard: epochs of the frames in the order in which they were on the job's channel.
    """

    status: JobStatus | None = None
    frames: list[Frame] = field(default_factory=list)
    result: Result | None = None
    expected: list[ChoiceResult] | None = None
    heard: Sequence[int] = ()
    envelope: Envelope | None = None


def judge_job(job_id: str, evidence: Evidence) -> Iterator[Fault]:
    """What is wrong with a job as Redis holds it, whoever asked for it."""
    frames = evidence.frames
    if evidence.status not in FINAL_STATUSES:
        yield Fault("lost", job_id, f"it is {evidence.status or 'unknown'} after the run")
        return
    yield from _numbers(job_id, "log", [frame.seq for frame in frames], range(1, len(frames) + 1))
    if [frame.last for frame in frames] != [False] * (len(frames) - 1) + [True]:
        yield Fault("lost", job_id, "its log does not end with its only last frame")
    for name, epochs in (("log", [frame.epoch for frame in frames]), ("channel", evidence.heard)):
        for before, after in pairwise(epochs):
            if after < before:
                yield Fault("fenced", job_id, f"{name}: epoch {after} behind epoch {before}")
    if evidence.status == "completed" and evidence.result is not None and evidence.expected is not None:
        choices = evidence.result.choices
        if choices != evidence.expected:
            yield Fault("different", job_id, f"result: {_texts(choices)} in place of {_texts(evidence.expected)}")


def judge_witness(witness: Witness, evidence: Evidence) -> Iterator[Fault]:
    """What is wrong with what a client saw of its job."""
    order, job_id = witness.order, witness.job_id or f"order {witness.order.number}"
    may_be_cancelled = order.cancel_at is not None or order.leaves_at is not None
    if witness.failure is not None:
        yield Fault("lost", job_id, witness.failure)
    elif witness.job_id is None:
        yield Fault("lost", job_id, "it was never accepted")
    elif evidence.status != "completed" and not (evidence.status == "cancelled" and may_be_cancelled):
        yield Fault("lost", job_id, f"it is {evidence.status}")
    if evidence.envelope is not None:
        asked = {name: order.sampling[name] for name in _KEPT if name in order.sampling}
        taken = {name: getattr(evidence.envelope.sampling, name) for name in asked}
        if asked != taken:
            yield Fault("different", job_id, f"{taken} was taken for {asked}")
    for reading in witness.readings:
        yield from _judge_reading(job_id, reading, evidence.frames)
    if witness.failure is not None or order.leaves_at is not None:
        return
    whole = [reading for reading in witness.readings if reading.status is not None]
    if order.way in ("whole", "fetch"):
        if witness.answer is None:
            yield Fault("lost", job_id, "there was no answer")
    elif len(whole) < order.readers:
        yield Fault("lost", job_id, f"{len(whole)} of {order.readers} streams came to their end")
    if evidence.expected is None:
        return
    for reading in whole:
        yield from _judge_content(job_id, reading, evidence.expected)
    if witness.answer is not None and evidence.status == "completed":
        expected = [Choice.of(choice) for choice in evidence.expected]
        if witness.answer != expected:
            yield Fault("different", job_id, f"answer: {witness.answer} in place of {expected}")


def judge_adapter(
    witness: Witness, evidence: Evidence, could_be: Callable[[str | None, str | None, int], bool]
) -> Iterator[Fault]:
    """Whether a job is computed with what the name that its client asked for stood for when it was submitted.

    Args:
        could_be: says so of a name, a content and a time in Unix milliseconds.
    """
    envelope = evidence.envelope
    if envelope is None:
        return
    asked = witness.order.adapter
    if envelope.adapter != asked or not could_be(asked, envelope.adapter_identity, envelope.created_ms):
        what = f"computed with {envelope.adapter} ({envelope.adapter_identity}), asked for was {asked}"
        yield Fault("different", envelope.id, what)


def _judge_reading(job_id: str, reading: Reading, frames: Sequence[Frame]) -> Iterator[Fault]:
    """The numbers, and each frame against the log."""
    seen = [arrival.seq for arrival in reading.arrivals]
    # Chunks show no frames in which there is nothing to see; the job's events, behind them, show all.
    chunks = max((arrival.seq for arrival in reading.arrivals if arrival.chunks), default=0)
    shown = [f.seq for f in frames if f.seq <= chunks and Arrival.of(f, chunks=True) is not None]
    yield from _numbers(job_id, "client", seen, [*shown, *range(chunks + 1, max(seen, default=0) + 1)])
    log = {frame.seq: frame for frame in frames}
    for arrival in reading.arrivals:
        frame = log.get(arrival.seq)
        told = None if frame is None else Arrival.of(frame, chunks=arrival.chunks)
        if told is None or told.deltas != arrival.deltas:
            yield Fault("fenced", job_id, f"frame {arrival.seq} is not that of the log: {arrival.deltas}")


@dataclass(slots=True)
class _Seen:
    """What the deltas of one choice make. `ids` is None once a delta did not show them."""

    text: str = ""
    finish: str | None = None
    ids: list[int] | None = field(default_factory=list)
    logprobs: tuple[float, ...] = ()


def _judge_content(job_id: str, reading: Reading, expected: Sequence[ChoiceResult]) -> Iterator[Fault]:
    """What a complete reading makes, against the undisturbed run; of what was cancelled, as far as it goes."""
    choices = [_Seen() for _ in expected]
    for delta in (delta for arrival in reading.arrivals for delta in arrival.deltas):
        seen = choices[delta.index]
        if seen.ids is not None and delta.offset is not None and delta.ids is not None:
            if delta.offset != len(seen.ids):
                kind: Kind = "gap" if delta.offset > len(seen.ids) else "repeat"
                yield Fault(kind, job_id, f"choice {delta.index}: token {delta.offset} behind {len(seen.ids)}")
            seen.ids += delta.ids
        else:
            seen.ids = None
        seen.text += delta.text
        seen.finish = seen.finish or delta.finish
        seen.logprobs += delta.logprobs
    for index, (seen, result) in enumerate(zip(choices, expected, strict=True)):
        if not _agrees(seen, result):
            what = f"choice {index}: {seen.text!r} ({seen.finish}), {seen.ids} in place of {result.text!r}"
            yield Fault("different", job_id, f"{what} ({result.finish_reason}), {result.token_ids}")


def _agrees(seen: _Seen, result: ChoiceResult) -> bool:
    whole = Choice.of(result)
    if seen.finish == "abort":
        ids = seen.ids is None or result.token_ids[: len(seen.ids)] == seen.ids
        # What was held back for a stop string is given out by the abort, and cut off where the string came.
        text = whole.text.startswith(seen.text) or (
            isinstance(result.stop_reason, str) and (whole.text + result.stop_reason).startswith(seen.text)
        )
        return ids and text and whole.logprobs[: len(seen.logprobs)] == seen.logprobs
    same = (seen.text, seen.finish, seen.logprobs) == (whole.text, whole.finish, whole.logprobs)
    return same and seen.ids in (None, result.token_ids)


def _numbers(job_id: str, where: str, seen: Sequence[int], wanted: Sequence[int]) -> Iterator[Fault]:
    """Faults in sequence numbers, which are to be `wanted`."""
    missing = sorted(set(wanted) - set(seen))
    if missing:
        yield Fault("gap", job_id, f"{where}: {missing} are missing in {_short(seen)}")
    twice = sorted(seq for seq, count in Counter(seen).items() if count > 1)
    if twice:
        yield Fault("repeat", job_id, f"{where}: {twice} came again in {_short(seen)}")
    firsts = list(dict.fromkeys(seen))
    if firsts != sorted(firsts):
        yield Fault("disorder", job_id, f"{where}: {_short(seen)}")


def _short(seen: Sequence[int]) -> str:
    return str(list(seen)) if len(seen) <= 24 else f"[{seen[0]} ... {seen[-1]}]"


def _texts(choices: Sequence[ChoiceResult]) -> list[tuple[str, str | None]]:
    return [(choice.text, choice.finish_reason) for choice in choices]
