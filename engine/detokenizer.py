"""Token ids to text, one id at a time, so that the pieces joined are the whole decoded text.

Byte-level BPE, by far the commonest, is decoded through a table of each token's bytes. Every other kind goes through
the tokenizer's own `decode` over a short window.
"""

from __future__ import annotations

import codecs
import json
from functools import cache
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT: Final = "\ufffd"
_WINDOW: Final = 8


class TextStream(Protocol):
    """Text of one choice as its ids come."""

    def push(self, token_id: int) -> str:
        """The text that this id makes certain; "" while a character is incomplete. An unknown id has no text."""

    def flush(self) -> str:
        """What was still held back; an incomplete character is one U+FFFD. Nothing may be pushed afterwards."""


class Detokenizer:
    """Makes text streams for one tokenizer, and knows the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = kinds == ["ByteLevel"]
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        if self._byte_level:
            for token, token_id in vocabulary.items():
                self._bytes[token_id] = _unmap(token)
            self._whole = [data or b"" for data in self._bytes]
            self._visible = [b"" if token_id in self._special else data for token_id, data in enumerate(self._whole)]
        self._fallback = _byte_tokens(vocabulary) if "ByteFallback" in kinds else {}
        for token_id, byte in self._fallback.items():
            self._bytes[token_id] = byte
        self._anchor = None if self._byte_level else self._find_anchor(vocabulary)

    def stream(self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> TextStream:
        """A stream for one choice, at its first output token.

        Without `spaces_between_special_tokens`, added tokens that follow each other are written as they are, whatever
        the tokenizer puts between them. As in vLLM this matters only where special tokens are shown.
        """
        if self._byte_level:  # puts nothing between tokens
            return _ByteStream(self._visible if skip_special_tokens else self._whole)
        skipped = self._special if skip_special_tokens else frozenset()
        spaced = skip_special_tokens or spaces_between_special_tokens
        return _WindowStream(self._tokenizer, skipped, frozenset(self._fallback), {} if spaced else self._added)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, special tokens as they are written; b"" for an unknown id."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        data = self._bytes[token_id]
        if data is None:
            data = self._bytes[token_id] = self._measure(token_id)
        return data

    def _measure(self, token_id: int) -> bytes:
        """Behind another token, since many decoders strip the space that begins a text."""
        if self._anchor is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        anchor, text = self._anchor
        return self._tokenizer.decode([anchor, token_id], skip_special_tokens=False)[len(text) :].encode()

    def _find_anchor(self, vocabulary: dict[str, int]) -> tuple[int, str] | None:
        for token, token_id in vocabulary.items():
            if token.isascii() and token.isalpha():
                return token_id, self._tokenizer.decode([token_id], skip_special_tokens=False)
        return None


class _ByteStream:
    """Bytes of each token into an incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = _UTF8("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._table[token_id]) if token_id < len(self._table) else ""

    def flush(self) -> str:
        return self._decode(b"", True)


class _WindowStream:
    """The difference that new ids make to the text of a few ids before them.

    Ids that spell single bytes are held back until their run ends, since one bad byte changes how the whole run reads.
    The window moves on only to ids that have text of their own, so that its first is never one whose space is stripped.
    """

    __slots__ = ("_bytes", "_ids", "_joined", "_skipped", "_text", "_tokenizer", "_unread")

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], byte_ids: frozenset[int], joined: dict[int, str]
    ) -> None:
        """`joined` are tokens with their text that have nothing between them where they follow each other."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._bytes = byte_ids
        self._joined = joined
        self._ids: list[int] = []
        self._text = ""  # of the ids that were read, all of which was given out
        self._unread = 0  # index of the first id that has given no text yet

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None:
            return ""
        if token_id in self._joined and self._ids and self._ids[-1] in self._joined:
            self._ids = [token_id]
            self._text, self._unread = self._decode(self._ids), 1
            return self._joined[token_id]
        self._ids.append(token_id)
        if token_id in self._bytes:
            return ""
        text = self._decode(self._ids)
        return "" if text.endswith(_REPLACEMENT) else self._advance(text)

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._text) :]

    def _advance(self, text: str) -> str:
        new = text[len(self._text) :]
        self._text = text
        # The ids just read, or a few more where these are but a space that a decoder strips.
        for tail in (self._ids[self._unread :], self._ids[-_WINDOW:]):
            own = self._decode(tail)
            if own:
                self._ids, self._text = tail, own
                break
        self._unread = len(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Types of the tokenizer's decoders, flattened; the library shows them only as JSON."""
    if tokenizer.decoder is None:
        return []
    tree: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())

    def flatten(node: dict[str, Any]) -> list[str]:
        children = node.get("decoders")
        return [node["type"]] if children is None else [kind for child in children for kind in flatten(child)]

    return flatten(tree)


def _byte_tokens(vocabulary: dict[str, int]) -> dict[int, bytes]:
    names = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return {vocabulary[name]: data for name, data in names.items() if name in vocabulary}


@cache
def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _unmap(token: str) -> bytes:
    """Bytes of a byte-level token; a token with any other character (an added one) is its own UTF-8."""
    alphabet = _alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()
