"""What a client saw of its job, and what anyone saw on the jobs' channels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shared.protocol import ChoiceFrame, ChoiceResult, Frame, TokenLogprob
from tests.support.chaos.plan import Order


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event added to one choice. None where the endpoint does not show it.

    Attributes:
        logprobs: of the new tokens, in order.
    """

    index: int
    text: str
    finish: str | None = None
    ids: tuple[int, ...] | None = None
    offset: int | None = None
    logprobs: tuple[float, ...] = ()

    @property
    def shown(self) -> Delta:
        """As the chunks of an OpenAI stream show it."""
        return Delta(self.index, self.text, self.finish, logprobs=self.logprobs)

    @classmethod
    def of(cls, choice: ChoiceFrame) -> Delta:
        """What a frame says."""
        return cls(choice.index, choice.text, choice.finish, tuple(choice.ids), choice.offset, _values(choice.logprobs))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One frame as it came. `at` is monotonic seconds; `chunks`: as chunks of an OpenAI stream, which show less."""

    at: float
    seq: int
    deltas: tuple[Delta, ...]
    chunks: bool = False

    @classmethod
    def of(cls, frame: Frame, *, chunks: bool = False) -> Arrival | None:
        """A frame as a client is to see it; None where it sees nothing of it."""
        deltas = tuple(Delta.of(choice) for choice in frame.choices)
        if chunks:
            deltas = tuple(d.shown for d in deltas if d.text or d.finish is not None or d.logprobs)
        return cls(0.0, frame.seq, deltas, chunks) if deltas or not chunks else None


@dataclass(slots=True)
class Reading:
    """One walk through a job's frames from the first on, over any number of connections.

    Attributes:
        status: in its last event; None if that never came.
        closed: by the client, which did not want more.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    status: str | None = None
    closed: bool = False

    @property
    def seq(self) -> int:
        """Number of the last frame that came whole."""
        return self.arrivals[-1].seq if self.arrivals else 0


@dataclass(slots=True)
class Choice:
    """A choice of a whole answer."""

    text: str
    finish: str | None
    logprobs: tuple[float, ...] = ()

    @classmethod
    def of(cls, choice: ChoiceResult) -> Choice:
        """What a result says."""
        return cls(choice.text, choice.finish_reason, _values(choice.logprobs))


@dataclass(slots=True)
class Witness:
    """One order as its client saw it.

    Attributes:
        job_id: known as soon as the order counts as accepted.
        readings: streams of its frames.
        answer: of a client that takes it whole.
        status: of the job as the client was told in the end.
        failure: why the client gave up, or what error it was told; None if all went well.
        refusals: answers that asked to come again, and connections that failed before there was any answer.
        losses: connections that were lost.
        drops: connections that the client itself gave up, to come back.
    """

    order: Order
    job_id: str | None = None
    readings: list[Reading] = field(default_factory=list)
    answer: list[Choice] | None = None
    status: str | None = None
    failure: str | None = None
    refusals: int = 0
    losses: int = 0
    drops: int = 0


def deltas_of_event(data: dict[str, Any]) -> tuple[Delta, ...]:
    """Of an event of `GET /v1/jobs/{id}/events`."""
    return tuple(
        Delta(
            choice["index"],
            choice["text"],
            choice["finish_reason"],
            tuple(choice["token_ids"]),
            choice["offset"],
            tuple(entry["logprob"] for entry in choice.get("logprobs") or ()),
        )
        for choice in data["choices"]
    )


def deltas_of_chunk(data: dict[str, Any]) -> tuple[Delta, ...]:
    """Of a chunk of an OpenAI stream."""
    return tuple(
        Delta(choice["index"], _text(choice), choice["finish_reason"], logprobs=_logprobs(choice))
        for choice in data["choices"]
    )


def choices_of(body: dict[str, Any]) -> list[Choice]:
    """Of a whole answer."""
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return [Choice(_text(choice), choice["finish_reason"], _logprobs(choice)) for choice in choices]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def _logprobs(choice: dict[str, Any]) -> tuple[float, ...]:
    entries = choice.get("logprobs") or {}
    if "token_logprobs" in entries:
        return tuple(entries["token_logprobs"])
    return tuple(entry["logprob"] for entry in entries.get("content") or ())


def _values(entries: list[TokenLogprob] | None) -> tuple[float, ...]:
    return tuple(entry.logprob for entry in entries or ())
