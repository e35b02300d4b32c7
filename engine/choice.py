"""One choice's way from sampled ids to deltas: text, stop conditions, finish reason."""

from __future__ import annotations

from engine.detokenizer import Detokenizer
from engine.request import ChoiceDelta, FinishReason, LogprobEntry, ResumedChoice
from engine.sequence import Sequence
from engine.stopping import StopMatcher
from shared.errors import EngineError, InvalidRequestError


def spelled(entry: LogprobEntry, detokenizer: Detokenizer) -> LogprobEntry:
    """The same entry, with the bytes of its tokens filled in."""
    spell = detokenizer.token_bytes
    entry.token = spell(entry.token_id)
    entry.top = [(token_id, logprob, rank, spell(token_id)) for token_id, logprob, rank, _ in entry.top]
    return entry


class ChoiceWriter:
    """Appends sampled ids to a sequence and says what each of them adds to its choice.

    Stop rules are vLLM's. Stop strings and ids count only behind `min_tokens` tokens. The id that ends a choice is in
    its ids, its text is not shown unless `include_stop_str_in_output`. A stop beats the length limit.
    """

    __slots__ = (
        "_detokenizer",
        "_ends",
        "_matcher",
        "_owed",
        "_published",
        "_sequence",
        "_stream",
        "_surplus",
        "finish_reason",
        "stop_reason",
    )

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer) -> None:
        params = sequence.params
        self._sequence = sequence
        self._detokenizer = detokenizer
        self._stream = None
        if params.detokenize:
            self._stream = detokenizer.stream(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        stops = params.stop_strings
        self._matcher = StopMatcher(stops, include=params.include_stop_str_in_output) if stops else None
        self._ends = frozenset() if params.ignore_eos else sequence.eos_token_ids
        self._ends |= frozenset(params.stop_token_ids or ())
        # Text that a resumed choice has and that was not published, or characters published beyond what is certain.
        self._owed = ""
        self._surplus = 0
        # Ids given out; behind the sequence's own count only after a failure.
        self._published = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def push(self, token_id: int, logprob: LogprobEntry | None) -> ChoiceDelta:
        """The delta of one more id; it has a finish reason if that was the last.

        Raises:
            EngineError: the request asks for log probabilities and there is none.
        """
        logprobs: list[LogprobEntry] | None = None
        if self._sequence.params.logprobs is not None:
            if logprob is None:
                raise EngineError("the sampler gave no log probability")
            logprobs = [spelled(logprob, self._detokenizer)]
        text = self._unpublished(self._accept(token_id))
        offset, self._published = self._published, self._published + 1
        return ChoiceDelta(
            self._sequence.index, offset, [token_id], text, logprobs, self.finish_reason, self.stop_reason
        )

    def resume(self, published: ResumedChoice) -> ChoiceDelta | None:
        """Take up a choice: its ids are output. The last delta, if they already end it, else None.

        Raises:
            InvalidRequestError: the published text is not what the ids spell.
        """
        pieces: list[str] = []
        for token_id in published.token_ids:
            # Ids behind the end are published and stay so; they add no text.
            if self.finish_reason is None:
                pieces.append(self._accept(token_id))
            else:
                self._sequence.tokens.append(token_id)
        self._published = len(published.token_ids)
        certain = "".join(pieces)
        if not (certain.startswith(published.text) or published.text.startswith(certain)):
            raise InvalidRequestError("resume: the published text does not belong to the token ids", param="resume")
        self._owed = certain[len(published.text) :]
        self._surplus = max(0, len(published.text) - len(certain))
        return None if self.finish_reason is None else self._last("")

    def close(self, reason: FinishReason) -> ChoiceDelta:
        """End an open choice from outside. `abort` releases held-back text, `error` does not touch it."""
        self.finish_reason = reason
        return self._last(self._flush() if reason == "abort" else "")

    def _last(self, text: str) -> ChoiceDelta:
        logprobs: list[LogprobEntry] | None = None if self._sequence.params.logprobs is None else []
        return ChoiceDelta(
            self._sequence.index,
            self._published,
            [],
            self._unpublished(text),
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )

    def _accept(self, token_id: int) -> str:
        """Append the id; the text that it makes certain, all that is left if it ends the choice."""
        sequence, params = self._sequence, self._sequence.params
        sequence.tokens.append(token_id)
        armed = sequence.output_len > params.min_tokens
        shown = True
        if armed and token_id in self._ends:
            self.finish_reason = "stop"
            if token_id not in sequence.eos_token_ids or params.ignore_eos:
                self.stop_reason = token_id
            shown = params.include_stop_str_in_output
        elif len(sequence.tokens) >= sequence.max_len:
            self.finish_reason = "length"
        text = self._stream.push(token_id) if self._stream is not None and shown else ""
        if self._matcher is not None:
            text, stop = self._matcher.feed(text, armed=armed)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.finish_reason is not None and not isinstance(self.stop_reason, str):
            text += self._flush()
        return text

    def _flush(self) -> str:
        """Half a character and a possible stop string, at the end of the choice."""
        tail = self._stream.flush() if self._stream is not None else ""
        if self._matcher is None:
            return tail
        text, _ = self._matcher.feed(tail, armed=False)
        return text + self._matcher.flush()

    def _unpublished(self, text: str) -> str:
        """The part of newly certain text that a resumed choice has not published yet; all of it for others."""
        if self._owed:
            text, self._owed = self._owed + text, ""
        if self._surplus:
            dropped = min(self._surplus, len(text))
            self._surplus -= dropped
            text = text[dropped:]
        return text
