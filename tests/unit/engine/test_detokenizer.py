"""Detokenizer: pieces joined equal the whole text, for any ids and any kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.detokenizer import Detokenizer
from tests.support import tiny_tokenizer as tiny

BYTE_LEVEL = tiny.byte_level()
SENTENCEPIECE = tiny.sentencepiece()


def word_piece() -> Tokenizer:
    """Words joined by spaces, with `##` for the inside of words."""
    pieces = ["the", "cat", "##s", ".", "##ing"]
    tokenizer = Tokenizer(models.WordPiece(vocab={text: i for i, text in enumerate(pieces)}, unk_token="the"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


def metaspace() -> Tokenizer:
    """Metaspace without byte fallback."""
    pieces = ["\u2581", "\u2581the", "cat", "\u2581\u2581", "\u2581cat", "\ufffd"]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def nested_byte_level(*more: decoders.Decoder) -> Tokenizer:
    """The decoder inside of a sequence, as some exporters write it."""
    tokenizer = tiny.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *more])
    return tokenizer


TOKENIZERS = {
    "byte level": BYTE_LEVEL,
    "nested byte level": nested_byte_level(),
    "byte level and more": nested_byte_level(decoders.Fuse()),
    "sentencepiece": SENTENCEPIECE,
    "word piece": word_piece(),
    "metaspace": metaspace(),
    "no decoder": Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "c": 2}, unk_token="a")),
}
DETOKENIZERS = {name: Detokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def pieces(detokenizer: Detokenizer, ids: list[int], skip: bool = True) -> list[str]:
    """The text of each id, then what was left."""
    stream = detokenizer.stream(skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_joined_pieces_equal_the_whole_text(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size()), max_size=24))
    assert "".join(pieces(DETOKENIZERS[name], ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=12), cut=st.integers(0, 40))
def test_pieces_hold_whole_characters_only(text: str, cut: int) -> None:
    ids = tiny.spell(text)[:cut]
    *sent, tail = pieces(DETOKENIZERS["byte level"], ids)
    assert text.startswith("".join(sent))
    assert tail in ("", "\ufffd")


def test_an_emoji_of_four_tokens_appears_at_once() -> None:
    for name in ("byte level", "nested byte level", "byte level and more"):
        assert pieces(DETOKENIZERS[name], tiny.spell("\U0001f600")) == ["", "", "", "\U0001f600", ""]
    spelled = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in "\U0001f600".encode()]
    end = SENTENCEPIECE.token_to_id("s")
    assert pieces(DETOKENIZERS["sentencepiece"], [*spelled, end]) == ["", "", "", "", "\U0001f600s", ""]


def test_an_incomplete_tail_is_flushed_once() -> None:
    assert pieces(DETOKENIZERS["byte level"], tiny.spell(b"a\xf0\x9f\x98")) == ["a", "", "", "", "\ufffd"]


def test_a_token_that_ends_one_character_and_begins_the_next() -> None:
    first, last = tiny.spell(b"\xc3")[0], tiny.spell(b"\xac")[0]
    straddle = tiny.piece(tiny.STRADDLE)
    detokenizer = DETOKENIZERS["byte level"]
    assert pieces(detokenizer, [first, straddle, last]) == ["", "\u00e9", "\u20ac", ""]
    assert b"".join(map(detokenizer.token_bytes, [first, straddle, last])).decode() == "\u00e9\u20ac"


def test_the_window_stays_short_in_a_run_of_spaces() -> None:
    space = SENTENCEPIECE.token_to_id("\u2581")
    stream = DETOKENIZERS["sentencepiece"].stream()
    ids = [SENTENCEPIECE.token_to_id("s"), *[space] * 200]
    assert "".join(map(stream.push, ids)) == "s" + " " * 200
    assert len(stream._ids) < 20  # type: ignore[attr-defined]


def test_streams_do_not_disturb_each_other() -> None:
    detokenizer = DETOKENIZERS["byte level"]
    one, two = detokenizer.stream(), detokenizer.stream()
    left, right = tiny.spell("\U0001f600!"), tiny.spell("\u00e9\u20ac")
    texts = [(one.push(a), two.push(b)) for a, b in zip(left, right, strict=True)]
    assert "".join(text for text, _ in texts) == "\U0001f600!"
    assert "".join(text for _, text in texts) == "\u00e9\u20ac"


def test_special_tokens_are_shown_only_on_request() -> None:
    ids = [tiny.piece("cat"), tiny.EOS, tiny.TOOL]
    assert pieces(DETOKENIZERS["byte level"], ids) == ["cat", "", "<tool call>", ""]
    assert pieces(DETOKENIZERS["byte level"], ids, skip=False) == ["cat", "<|end|>", "<tool call>", ""]


def spaced() -> Tokenizer:
    """No decoder, so that the library puts a space between all tokens, special ones too."""
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<x>", "<y>"])
    return tokenizer


@pytest.mark.parametrize(
    ("skip", "spaces", "text"),
    [(True, True, "a b a"), (True, False, "a b a"), (False, True, "a <x> <y> <x> b <y> a"),
     (False, False, "a <x><y><x> b <y> a")],
)  # fmt: skip
def test_spaces_between_special_tokens(skip: bool, spaces: bool, text: str) -> None:
    stream = Detokenizer(spaced()).stream(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert "".join(map(stream.push, [0, 2, 3, 2, 1, 3, 0])) + stream.flush() == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_without_added_tokens_side_by_side_spaces_between_them_do_not_matter(name: str) -> None:
    ids = list(range(TOKENIZERS[name].get_vocab_size()))[:3] * 3
    one = DETOKENIZERS[name].stream(skip_special_tokens=False)
    two = DETOKENIZERS[name].stream(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert list(map(one.push, ids)) == list(map(two.push, ids))


def test_token_bytes_keep_spaces_and_halves() -> None:
    byte, sentence = DETOKENIZERS["byte level"], DETOKENIZERS["sentencepiece"]
    assert byte.token_bytes(tiny.piece(" cat")) == b" cat"
    assert byte.token_bytes(tiny.spell(b"\xf0")[0]) == b"\xf0"
    assert byte.token_bytes(tiny.EOS) == b"<|end|>"
    assert sentence.token_bytes(SENTENCEPIECE.token_to_id("\u2581cat")) == b" cat"
    assert sentence.token_bytes(SENTENCEPIECE.token_to_id("<0xE9>")) == b"\xe9"
    assert byte.token_bytes(tiny.VOCAB_SIZE + 5) == sentence.token_bytes(10**6) == b""


@given(st.lists(st.integers(0, tiny.VOCAB_SIZE - 1), max_size=16))
def test_bytes_of_tokens_joined_are_the_text(ids: list[int]) -> None:
    joined = b"".join(map(DETOKENIZERS["byte level"].token_bytes, ids))
    assert joined.decode(errors="replace") == BYTE_LEVEL.decode(ids, skip_special_tokens=False)
