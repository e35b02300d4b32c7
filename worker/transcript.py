"""What has been published of a job: the stuff of its `Result`, and of its resumption elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.request import LogprobEntry, ResumedChoice
from shared.errors import ProtocolError
from shared.protocol import (
    ChoiceFrame,
    ChoiceResult,
    Envelope,
    ErrorInfo,
    FinishReason,
    JobStatus,
    Result,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None


class Transcript:
    """Frames of a job added up, choice by choice. Not thread-safe: it has one user at a time.

    Args:
        choices: how many the job has.
        prompt_entries: the most log probabilities that its prompt can have; None where they are not asked for.
    """

    def __init__(self, choices: int, prompt_entries: int | None = None) -> None:
        self._choices = [_Choice() for _ in range(choices)]
        self._most = prompt_entries
        self._prompt: list[TokenLogprob] = []

    @classmethod
    def of(cls, envelope: Envelope) -> Transcript:
        """That of a job of which nothing is published yet."""
        asked = envelope.sampling.prompt_logprobs is not None
        return cls(envelope.sampling.n, len(envelope.prompt_token_ids) - 1 if asked else None)

    def clear(self) -> None:
        """Forget everything."""
        self._choices = [_Choice() for _ in self._choices]
        self._prompt = []

    def add(self, frames: Iterable[ChoiceFrame], prompt: Sequence[TokenLogprob] = ()) -> None:
        """Append what one frame says: of the prompt, then of the choices.

        Raises:
            ProtocolError: a choice that the job does not have, tokens that do not follow those before them, or log
                probabilities of a prompt that has none, or has fewer, or is answered already.
        """
        if prompt:
            self._add_prompt(prompt)
        for frame in frames:
            if not 0 <= frame.index < len(self._choices):
                raise ProtocolError(f"a frame speaks of choice {frame.index} of {len(self._choices)}")
            choice = self._choices[frame.index]
            if frame.offset != len(choice.token_ids) or choice.finish is not None:
                raise ProtocolError(
                    f"a frame has offset {frame.offset} where {len(choice.token_ids)} tokens came before"
                )
            choice.token_ids += frame.ids
            choice.text.append(frame.text)
            if frame.logprobs is not None:
                choice.logprobs = (choice.logprobs or []) + frame.logprobs
            choice.finish, choice.stop = frame.finish, frame.stop

    def _add_prompt(self, entries: Sequence[TokenLogprob]) -> None:
        most = self._most or 0
        if len(self._prompt) + len(entries) > most:
            raise ProtocolError(
                f"a frame has {len(entries)} log probabilities of the prompt behind {len(self._prompt)} of {most}"
            )
        if self.completion_tokens:
            raise ProtocolError("a frame has log probabilities of the prompt behind tokens of the answer")
        self._prompt += entries

    @property
    def prompt_entries(self) -> int:
        """Log probabilities of the prompt so far."""
        return len(self._prompt)

    @property
    def complete(self) -> bool:
        """Every choice has its finish reason."""
        return all(choice.finish is not None for choice in self._choices)

    @property
    def aborted(self) -> bool:
        """Some choice was cut short by a cancel."""
        return any(choice.finish == "abort" for choice in self._choices)

    @property
    def completion_tokens(self) -> int:
        """Over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def finishes(self) -> tuple[FinishReason | None, ...]:
        """Of each choice; None where it is open."""
        return tuple(choice.finish for choice in self._choices)

    @property
    def longest(self) -> int:
        """Tokens of the longest choice."""
        return max(len(choice.token_ids) for choice in self._choices)

    def resumed(self) -> list[ResumedChoice]:
        """Choices of which anything is published, for the engine that takes the job up."""
        return [
            ResumedChoice(index, list(choice.token_ids), "".join(choice.text), choice.finish)
            for index, choice in enumerate(self._choices)
            if choice.token_ids or choice.finish is not None
        ]

    def result(
        self, job_id: str, status: JobStatus, usage: Usage, timings: Timings, error: ErrorInfo | None = None
    ) -> Result:
        """The outcome. After an error, choices that were still open say so."""
        open_reason: FinishReason | None = "error" if error is not None else None
        choices = [
            ChoiceResult(
                index=index,
                text="".join(choice.text),
                token_ids=choice.token_ids,
                logprobs=choice.logprobs,
                finish_reason=choice.finish or open_reason,
                stop_reason=choice.stop,
            )
            for index, choice in enumerate(self._choices)
        ]
        return Result(
            id=job_id,
            status=status,
            choices=choices,
            prompt_logprobs=None if self._most is None else self._prompt,
            usage=usage,
            timings=timings,
            error=error,
        )


def wire_logprob(entry: LogprobEntry) -> TokenLogprob:
    """An engine's log probability as it travels."""
    top = [TopLogprob(id=token, logprob=value, rank=rank, token=data) for token, value, rank, data in entry.top]
    return TokenLogprob(id=entry.token_id, logprob=entry.logprob, rank=entry.rank, token=entry.token, top=top)
