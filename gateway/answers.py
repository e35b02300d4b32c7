"""One request's answer, built from the frames of its jobs: chunk by chunk, or whole at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import structlog
from msgspec import UNSET, UnsetType

from gateway import errors, wire_format
from gateway.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from gateway.wire_format import (
    Body,
    ChatChoice,
    ChatChunkChoice,
    ChatMessage,
    CompletionChoice,
    Delta,
    UsageBody,
    encode,
    event,
)
from shared.errors import JobError, ProtocolError, RopewayError
from shared.protocol import ChoiceFrame, ErrorInfo, FinishReason, Frame, Result, Timings, TokenLogprob, Usage

log = structlog.get_logger(__name__)

_FAILED = frozenset({"failed", "expired"})


@dataclass(frozen=True, slots=True)
class Shape:
    """How an answer looks.

    Attributes:
        kind: endpoint.
        job_ids: one per prompt.
        n: choices per prompt; choice `i` of prompt `p` has the index `p * n + i`.
        logprobs: candidates per position; None where not asked for.
        prompt_logprobs: the same of the prompt. Its entries may hold more, where an echo asked for them.
        include_usage: a last chunk with the usage.
        echo: per prompt the text in front of its choices; empty for none.
        first: per echoed prompt its first token.
        echo_only: nothing but the echo is shown.
        hidden: token ids that the text of an answer does not show.
        service_tier: the one that it is served in, where one was asked for.
    """

    kind: Literal["chat", "completion"]
    model: str
    job_ids: Sequence[str]
    n: int
    created: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_usage: bool = False
    echo: Sequence[str] = ()
    first: Sequence[str] = ()
    echo_only: bool = False
    hidden: frozenset[int] = frozenset()
    service_tier: str | None = None

    @property
    def id(self) -> str:
        """The answer's id: made of its first job's."""
        return ("chatcmpl-" if self.kind == "chat" else "cmpl-") + self.job_ids[0]


@dataclass(slots=True)
class _Choice:
    """What was received of one choice."""

    offsets: TextOffsets
    tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None


class Answer:
    """Collects the frames of a request's jobs.

    Chunks are given as they come; the whole answer when all jobs have ended. Text is kept only if `whole`.
    """

    def __init__(self, shape: Shape, *, whole: bool) -> None:
        self.shape = shape
        self._whole = whole
        self._choices = [_Choice(TextOffsets(0, shape.hidden)) for _ in range(len(shape.job_ids) * shape.n)]
        self._prompts: list[list[TokenLogprob]] = [[] for _ in shape.job_ids]
        self._usages = [Usage() for _ in shape.job_ids]
        self._object: Literal["chat.completion.chunk", "text_completion"] = (
            "chat.completion.chunk" if shape.kind == "chat" else "text_completion"
        )
        self._id = shape.id
        self._tier: str | UnsetType = UNSET if shape.service_tier is None else shape.service_tier
        self._tail: list[tuple[int, ChoiceFrame]] = []
        self.timings: Timings | None = None
        self.any_text = False
        self.events = 0

    @property
    def usage(self) -> Usage:
        """Over all jobs, as far as they have ended."""
        return Usage(
            prompt_tokens=sum(u.prompt_tokens for u in self._usages),
            completion_tokens=sum(u.completion_tokens for u in self._usages),
            cached_tokens=sum(u.cached_tokens for u in self._usages),
        )

    def opening(self) -> bytes:
        """Events in front of all others: the role of each chat choice, or the echoed prompt."""
        if self.shape.kind == "chat":
            return b"".join(
                self._chunk(ChatChunkChoice(i, Delta(role="assistant", content=""))) for i in range(len(self._choices))
            )
        if not self.shape.echo:
            return b""
        return b"".join(
            self._chunk(CompletionChoice(i, self.shape.echo[i // self.shape.n])) for i in range(len(self._choices))
        )

    def add(self, job: int, frame: Frame, *, chunks: bool) -> bytes:
        """Take one frame of a job; answers its events, of which the last carries the sequence number.

        With several jobs numbers mean nothing to a client, and are left out.

        Raises:
            RopewayError: the job ended with an error; what clients may see of it.
            ProtocolError: tokens are missing or come twice.
        """
        if self._whole:
            self._prompts[job] += frame.prompt_logprobs
        shown = [pair for choice in frame.choices if (pair := self._accept(job, choice)) is not None]
        number = frame.seq if len(self.shape.job_ids) == 1 else None
        if frame.last:
            self._usages[job] = frame.usage or self._usages[job]
            self.timings = frame.timings or self.timings
            if frame.kind == "error" or frame.status in _FAILED:
                self._tail = shown
                info = frame.error or ErrorInfo(message="the job ended without a reason", code="job_failed")
                raise errors.error_of(info, self.shape.job_ids[job])
            shown += self._close(job, "abort")
        if not chunks or not shown:
            return b""
        pieces = [self._delta(index, choice, None) for index, choice in shown[:-1]]
        pieces.append(self._delta(*shown[-1], number))
        return b"".join(pieces)

    def failure(self, info: ErrorInfo) -> bytes:
        """The end of a stream that failed: a finish chunk for each open choice, one error event, and the end."""
        closed = self._tail + [pair for job in range(len(self.shape.job_ids)) for pair in self._close(job, "error")]
        return b"".join(self._delta(i, c, None) for i, c in closed) + event(errors.body(info)) + wire_format.DONE

    def closing(self) -> bytes:
        """The end of a stream that went well."""
        if not self.shape.include_usage:
            return wire_format.DONE
        usage = UsageBody.of(self._usages)
        return event(encode(self._body([], usage))) + wire_format.DONE

    @property
    def candidates(self) -> int:
        """Of all prompts together: what makes a whole answer large."""
        return sum(1 + len(entry.top) for prompt in self._prompts for entry in prompt)

    def whole(self) -> bytes:
        """The answer as one JSON object."""
        if self.shape.kind == "completion":
            choices = [choice for job in range(len(self._prompts)) for choice in self._completion_choices(job)]
            return encode(self._body(choices, UsageBody.of(self._usages)))
        body = Body(
            self.shape.id,
            "chat.completion",
            self.shape.created,
            self.shape.model,
            [self._chat_choice(i, c) for i, c in enumerate(self._choices)],
            UsageBody.of(self._usages),
            prompt_logprobs=self._prompt_logprobs(0),
            service_tier=self._tier,
        )
        return encode(body)

    def _accept(self, job: int, choice: ChoiceFrame) -> tuple[int, ChoiceFrame] | None:
        """Keep what a frame adds to a choice; None where it adds nothing that a client sees."""
        index = job * self.shape.n + choice.index
        if not 0 <= choice.index < self.shape.n:
            raise ProtocolError(f"job {self.shape.job_ids[job]}: choice {choice.index} of {self.shape.n}")
        kept = self._choices[index]
        if kept.finish is not None:
            log.warning("answer.after_finish", job_id=self.shape.job_ids[job], choice=index)
            return None
        if choice.ids and choice.offset != kept.tokens:
            raise ProtocolError(f"job {self.shape.job_ids[job]}: token {choice.offset} follows {kept.tokens}")
        kept.tokens += len(choice.ids)
        if choice.text:
            self.any_text = True
        if self._whole:
            kept.pieces.append(choice.text)
            kept.logprobs += choice.logprobs or ()
        kept.finish, kept.stop = choice.finish, choice.stop
        if not choice.text and choice.finish is None and not (choice.logprobs and self.shape.logprobs is not None):
            return None
        return index, choice

    def _close(self, job: int, reason: FinishReason) -> list[tuple[int, ChoiceFrame]]:
        """Finish chunks for choices of a job that have none yet."""
        closed = []
        for index in range(job * self.shape.n, (job + 1) * self.shape.n):
            if self._choices[index].finish is None:
                self._choices[index].finish = reason
                closed.append((index, ChoiceFrame(index=index % self.shape.n, finish=reason)))
        return closed

    def _delta(self, index: int, choice: ChoiceFrame, number: int | None) -> bytes:
        stop = UNSET if choice.finish is None else choice.stop
        most = self.shape.logprobs
        if self.shape.kind == "chat":
            logprobs = None if most is None or not choice.logprobs else chat_logprobs(choice.logprobs, most)
            delta = Delta(content=choice.text) if choice.text or logprobs is not None else Delta()
            return self._chunk(ChatChunkChoice(index, delta, logprobs, choice.finish, stop), number)
        kept = self._choices[index]
        values = None
        if most is not None and choice.logprobs:
            values = completion_logprobs(choice.logprobs, most, kept.offsets)
        return self._chunk(CompletionChoice(index, choice.text, values, choice.finish, stop), number)

    def _chunk(self, choice: ChatChunkChoice | CompletionChoice, number: int | None = None) -> bytes:
        self.events += 1
        usage = None if self.shape.include_usage else UNSET
        return event(encode(self._body([choice], usage)), number)

    def _body(self, choices: Sequence[ChatChunkChoice | CompletionChoice], usage: UsageBody | UnsetType | None) -> Body:
        shape = self.shape
        return Body(self._id, self._object, shape.created, shape.model, choices, usage, service_tier=self._tier)

    def _chat_choice(self, index: int, kept: _Choice) -> ChatChoice:
        most = self.shape.logprobs
        logprobs = None if most is None else chat_logprobs(kept.logprobs, most)
        message = ChatMessage("assistant", "".join(kept.pieces))
        return ChatChoice(index, message, logprobs, kept.finish, kept.stop)

    def _completion_choices(self, job: int) -> list[CompletionChoice]:
        """The choices of one prompt, each with all that is said of the prompt."""
        shape, most = self.shape, self.shape.logprobs
        prompt, echo = self._prompt_logprobs(job), shape.echo[job] if shape.echo else ""
        echoed: CompletionLogprobs | None = None
        if shape.first and most is not None:
            echoed = echoed_logprobs(echo, shape.first[job], self._prompts[job], most)
        choices = []
        for index in range(job * shape.n, (job + 1) * shape.n):
            kept = self._choices[index]
            text, logprobs = echo, echoed
            if not shape.echo_only:
                text += "".join(kept.pieces)
                if most is not None:
                    own = completion_logprobs(kept.logprobs, most, TextOffsets(len(echo), shape.hidden))
                    logprobs = own if echoed is None else echoed + own
            choices.append(CompletionChoice(index, text, logprobs, kept.finish, kept.stop, prompt))
        return choices

    def _prompt_logprobs(self, job: int) -> PromptLogprobs | UnsetType:
        most = self.shape.prompt_logprobs
        return UNSET if most is None else [None, *prompt_logprobs(self._prompts[job], most)]


def from_result(shape: Shape, result: Result) -> bytes:
    """The whole answer of one job from its stored result."""
    answer = Answer(shape, whole=True)
    frame = Frame(
        v=result.v,
        seq=1,
        epoch=0,
        kind="done",
        choices=[
            ChoiceFrame(
                index=c.index,
                ids=c.token_ids,
                text=c.text,
                logprobs=c.logprobs,
                finish=c.finish_reason,
                stop=c.stop_reason,
            )
            for c in result.choices
        ],
        prompt_logprobs=result.prompt_logprobs or [],
        status="completed",
        usage=result.usage,
        timings=result.timings,
    )
    answer.add(0, frame, chunks=False)
    return answer.whole()


def now() -> int:
    """Unix seconds, as `created` has them."""
    return int(time.time())


def as_error(error: BaseException, reference: str) -> ErrorInfo:
    """What a client is told of an exception in mid-stream; the log has the rest."""
    if isinstance(error, RopewayError):
        if isinstance(error, ProtocolError) or (isinstance(error, JobError) and error.status == 500):
            log.error("stream.failed", reference=reference, error=error.message)
        return errors.public(error, reference)
    log.error("stream.internal_error", reference=reference, exc_info=error)
    return errors.internal(reference)
