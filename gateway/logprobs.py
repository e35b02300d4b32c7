"""Log probabilities as clients see them: those of a chat, of a completion, of a prompt. JSON has no infinity."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

import msgspec

from shared.protocol import TokenLogprob, TopLogprob

#: The least log probability that is sent.
LOGPROB_FLOOR = -9999.0

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TopToken(msgspec.Struct, frozen=True):
    """A candidate of a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    """A token of a chat answer with its log probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a chat answer, one entry per token."""

    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a completion, one entry per token in each list; null for an echoed prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, other: CompletionLogprobs) -> CompletionLogprobs:
        return CompletionLogprobs(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class PromptLogprob(msgspec.Struct, frozen=True):
    """A candidate of a position of the prompt; `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


#: One entry per token of a prompt: candidates by token id, the prompt's own token among them; None for the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TextOffsets:
    """Where tokens begin in a text, in characters. A token that goes on with a character begins where that does."""

    def __init__(self, start: int = 0, hidden: frozenset[int] = frozenset()) -> None:
        """`start` is where the first token begins; `hidden` are ids that the text does not show."""
        self._next, self._hidden = start, hidden
        self._decoder = _UTF8("replace")

    def place(self, entry: TokenLogprob) -> int:
        """Where the next token begins."""
        at = self._next
        if entry.id in self._hidden:
            return at
        goes_on = 0x80 <= entry.token[0] < 0xC0 if entry.token else True
        if self._decoder.getstate()[0] and not goes_on:
            at += 1  # behind the U+FFFD of a character that stays incomplete
        self._next += len(self._decoder.decode(entry.token))
        return at

    def end(self) -> int:
        """Where the text ends, if nothing follows."""
        return self._next + len(self._decoder.decode(b"", True))


def chat_logprobs(entries: Sequence[TokenLogprob], most: int) -> ChatLogprobs:
    """Entries as chat shows them, with at most `most` candidates each."""
    return ChatLogprobs(
        [
            ChatToken(
                _text(e.token), _finite(e.logprob), list(e.token), [_top(candidate) for candidate in e.top[:most]]
            )
            for e in entries
        ]
    )


def completion_logprobs(entries: Sequence[TokenLogprob], most: int, offsets: TextOffsets) -> CompletionLogprobs:
    """Entries as completions show them; the token itself is always among the candidates."""
    return CompletionLogprobs(
        [_text(e.token) for e in entries],
        [_finite(e.logprob) for e in entries],
        [_by_text(e, most) for e in entries],
        [offsets.place(e) for e in entries],
    )


def echoed_logprobs(text: str, first: str, entries: Sequence[TokenLogprob], most: int) -> CompletionLogprobs:
    """A prompt's tokens as they go in front of a completion.

    Args:
        text: the prompt as it is echoed.
        first: its first token, which has no entry.
    """
    offsets = TextOffsets(len(first))
    rest = completion_logprobs(entries, most, offsets)
    # What the text does not show is at its beginning (a BOS, a space that the tokenizer puts there, tokens that were
    # cut off), so tokens have their places as seen from its end.
    shift = len(text) - offsets.end()
    places = [max(0, place + shift) for place in (0, *rest.text_offset)]
    return CompletionLogprobs([first, *rest.tokens], [None, *rest.token_logprobs], [None, *rest.top_logprobs], places)


def prompt_logprobs(entries: Sequence[TokenLogprob], most: int) -> list[dict[int, PromptLogprob]]:
    """Entries of a prompt's tokens, with at most `most` candidates each and the token itself."""
    return [
        {e.id: PromptLogprob(_finite(e.logprob), e.rank, _text(e.token))}
        | {t.id: PromptLogprob(_finite(t.logprob), t.rank, _text(t.token)) for t in e.top[:most]}
        for e in entries
    ]


def _by_text(entry: TokenLogprob, most: int) -> dict[str, float]:
    """Candidates by text. Of several that read the same, such as parts of a character, the likeliest is shown."""
    top: dict[str, float] = {}
    for candidate in entry.top[:most]:
        top.setdefault(_text(candidate.token), _finite(candidate.logprob))
    top.setdefault(_text(entry.token), _finite(entry.logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR) if math.isfinite(logprob) else LOGPROB_FLOOR


def _top(candidate: TopLogprob) -> TopToken:
    return TopToken(_text(candidate.token), _finite(candidate.logprob), list(candidate.token))


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
